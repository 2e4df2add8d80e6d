"""Messages between processes, and what each knows of its peers, on a board in memory."""

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from signal import Signals
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import jax
import pytest
from jax._src.distributed import global_state
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

import megatrain_jax as mt
from boards import MESSAGES, PRESENCE, FakeBoard, look, present, processes_of
from megatrain_jax._src.common.activity import HERE, doing, progressed
from megatrain_jax._src.engine.state import coordination, presence
from megatrain_jax._src.engine.state import processes as of_processes
from megatrain_jax._src.engine.state.coordination import CoordinationService
from megatrain_jax._src.engine.state.processes import PeerEndedError, Processes
from megatrain_jax._src.engine.train import run, source
from messages import tells
from ports import free_port


def test_values_come_in_the_order_of_processes():
    board = FakeBoard({0: {"where": "here", "value": 7}, 2: {"where": "here", "value": [1]}})
    assert processes_of(board, 3, 1).gather("here", "own") == [7, "own", [1]]


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_process_deletes_messages_that_all_have_read(index):
    board = FakeBoard({1 - index: {"where": "step", "value": None}})
    processes, sizes = processes_of(board, 2, index), []
    for _ in range(200):
        processes.gather("step")
        sizes.append(sum(key.startswith(MESSAGES) for key in board.notes))
    assert (max(sizes) < 150) == (index == 0)
    assert min(sizes) >= 2, "a slower peer may still have to read the newest messages"


def test_messages_that_a_peer_still_reads_stay_though_the_first_process_goes_on():
    board = FakeBoard({1: {"where": "step", "value": None}})
    processes = processes_of(board)
    while processes._sent % of_processes._BLOCK or not processes._sent:
        processes.gather("step")
    newest = f"{MESSAGES}0/{of_processes._BLOCK - 1}/0"
    board.answers = {}
    processes.leave("an error")
    with pytest.raises(AssertionError):
        processes.gather("the end of training")
    assert processes._sent == of_processes._BLOCK + 2 and newest in board.notes


def test_what_differs_in_any_process_is_named():
    def digests(facts):
        """What a process sends for these facts."""
        processes, sent = processes_of(FakeBoard()), []
        processes.gather = lambda where, value=None: sent.append(value) or [value]
        processes.agree("the beginning", lambda: facts)
        return sent[0]

    board = FakeBoard()
    same, other = ({"a": 1, "b": value} for value in (2, 3))
    for peers in ([same, other], [other, same], [other, other]):
        rows = ({"where": "the beginning", "value": digests(facts)} for facts in peers)
        board.answers = dict(enumerate(rows, 1))
        with pytest.raises(ValueError) as raised:
            processes_of(board, 3).agree("the beginning", lambda: same)
        number = 1 + peers.index(other)
        assert tells(str(raised.value), "b", f"process {number}", "(3, not 2)")
        assert not tells(str(raised.value), "a of")


def test_long_values_are_compared_but_not_shown():
    board = FakeBoard({1: lambda own: {"where": own["where"], "value": {"text": "#0"}}})
    with pytest.raises(ValueError) as raised:
        processes_of(board).agree("the beginning", lambda: {"text": "x" * 1000})
    assert tells(str(raised.value), "text", "process 1") and "xx" not in str(raised.value)


def test_a_process_that_leaves_waits_for_nobody_and_the_next_message_is_another_one():
    board = FakeBoard()
    processes = processes_of(board, 2, 1)
    processes.leave("OSError: full", "SIGTERM")
    (first,) = board.notes.values()
    board.answers = {0: {"where": "the end", "value": 3}}
    assert processes.gather("the end", 4) == [3, 4]
    peer = processes_of(FakeBoard({1: {"left": "OSError: full", "signal": "SIGTERM"}}))
    with pytest.raises(PeerEndedError) as raised:
        peer.gather("a step")
    assert tells(str(raised.value), "process 1", "OSError: full")
    assert raised.value.signal == "SIGTERM" and b"OSError: full" in first


@pytest.mark.parametrize("received", [None, "SIGINT", "SIGTERM"])
@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("wrong"), KeyboardInterrupt(), jax.errors.JaxRuntimeError("aborted")),
        mt.StopTraining("enough"),
    ],
)
def test_peers_are_told_by_which_signal_a_run_ends(error, received, handled):
    """An interrupt that a callback raises is one, too; SIGTERM with a handler is no end."""
    board = FakeBoard()
    processes = processes_of(board, 2, 1)
    signals: Any = SimpleNamespace(
        has_received=received is not None, terminates=received == "SIGTERM" and not handled
    )
    assert run._tell_peers(error, processes, signals) is error
    (told,) = (json.loads(text) for key, text in board.notes.items() if key.startswith(MESSAGES))
    peers = processes_of(FakeBoard({1: told}))
    with pytest.raises(PeerEndedError) as raised:
        peers.gather("a step")
    assert tells(str(raised.value), "process 1", type(error).__name__)
    interrupted = received is not None or isinstance(error, KeyboardInterrupt)
    expected = "SIGTERM" if signals.terminates else "SIGINT" if interrupted else None
    if isinstance(error, mt.StopTraining) and not received:
        expected = "StopTraining"
    assert raised.value.signal == expected
    assert bool(present(processes).ending) == isinstance(error, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize("signal", [None, "SIGINT", "SIGTERM", "StopTraining"])
def test_a_run_ends_by_the_signal_of_its_peer(signal):
    board, noted = FakeBoard(), []
    signals: Any = SimpleNamespace(note=noted.append, ending=False)
    error = PeerEndedError("process 1 has ended", signal)
    found = run._tell_peers(error, processes_of(board), signals)
    assert not board.notes, "all know it already"
    assert (found is error) if signal is None else isinstance(found, KeyboardInterrupt)
    is_stopped = signal == "StopTraining"
    assert isinstance(found, mt.StopTraining) == is_stopped and "process 1" in str(error)
    assert noted == ([] if signal is None or is_stopped else [Signals[signal]])
    assert signals.ending == (signal is not None)


def test_a_peer_that_has_left_for_good_is_not_waited_for():
    board = FakeBoard()
    processes = processes_of(board, 4)
    for i in (1, 3):
        board.show(i, gone=True, why=f"error {i}")
    look(processes, 0)
    with pytest.raises(PeerEndedError) as raised:
        processes.gather("step 3")
    assert tells(str(raised.value), "process 1", "node1", "step 3", "error 1")
    assert not tells(str(raised.value), "error 3")
    assert processes.unreachable is not None
    with pytest.raises(PeerEndedError):
        processes.leave("the same error again")


@pytest.mark.parametrize("has_come", [False, True])
def test_a_peer_that_gave_another_one_up_is_quoted(has_come):
    board = FakeBoard({1: {"where": "step 3", "value": None}} if has_come else None)
    processes = processes_of(board, 3)
    board.show(1, gone=True, why="process 2 on node2 has not come to step 3.")
    look(processes, 0)
    with pytest.raises(PeerEndedError) as raised:
        processes.gather("step 3")
    assert tells(str(raised.value), "process 1", "process 2", "has not come")


@pytest.mark.parametrize("is_late", [False, True])
def test_the_last_message_of_a_peer_that_has_left_is_read(is_late):
    board = FakeBoard({1: {"where": "the end", "value": 5}})
    processes = processes_of(board)
    board.show(1, gone=True)
    look(processes, 0)
    if is_late:  # it comes after a look for it
        answers, board.answers, read = board.answers, {}, board.read

        def read_first(folder):
            found = read(folder)
            board.answers = answers
            board.write(f"{folder}/0", board.notes[f"{folder}/0"])
            return found

        board.read = read_first
    assert processes.gather("the end", 4) == [4, 5]


def test_one_that_has_left_after_its_last_message_leaves_time_for_the_other():
    board = FakeBoard({1: {"where": "the end", "value": 5}})
    processes = processes_of(board, 3)
    board.show(1, gone=True)
    look(processes, 0)
    wait, waits = board.wait, iter(range(9))

    def third_comes(key: str, seconds: float) -> None:
        wait(key, seconds)
        if next(waits) == 1:
            message = json.dumps({"where": "the end", "value": 6})
            board.notes[f"{key.rpartition('/')[0]}/2"] = message.encode()

    board.wait = third_comes
    assert processes.gather("the end", 4) == [4, 5, 6]


@pytest.mark.parametrize("seconds", [106, 120])
def test_a_peer_that_never_comes_is_named_with_what_it_does(seconds):
    board = FakeBoard()
    processes = processes_of(board)
    board.show(1, doing="drawing batch 7", of_user=True)
    processes.patience = 100
    assert look(processes, 0) == ""
    for beat in range(seconds // 2):
        board.show(1, doing="drawing batch 7", of_user=True, beat=beat)
        assert look(processes, 2) == ""
    # At first its own watch interrupts it, and the board is asked in vain.
    is_early = seconds < 115
    with pytest.raises(AssertionError if is_early else PeerEndedError) as raised:
        processes.gather("step 3")
    told = "process 1", "node1", "step 3", "drawing batch 7", "100 s"
    assert is_early or tells(str(raised.value), *told)


def test_progress_anywhere_is_progress():
    board = FakeBoard()
    processes = processes_of(board)
    for count in range(5):
        board.show(1, beat=count, count=count // 2)
        look(processes, 10)
    assert present(processes).idle_seconds == 0
    look(processes, 10)
    assert present(processes).idle_seconds == 10
    progressed()
    look(processes, 10)
    assert present(processes).idle_seconds == 0


def test_a_silent_peer_is_one_whose_row_stays_as_it_is():
    board = FakeBoard()
    processes = processes_of(board)
    assert look(processes, 100) == "", "it has not begun a run"
    board.show(1, beat=1, doing="computing step 4")
    assert look(processes, 10) == ""
    board.show(1, beat=2, doing="computing step 4")
    assert look(processes, 29) == ""
    assert look(processes, 29) == ""
    assert tells(look(processes, 2), "process 1", "node1", "computing step 4")


def test_a_service_that_does_not_answer_is_noticed():
    processes = processes_of(FakeBoard(), 2, 1)
    assert look(processes, 1) == ""
    assert look(processes, 29, heard=False) == ""
    assert tells(look(processes, 2, heard=False), "process 0")


def test_a_process_waits_at_its_end_for_peers_that_show_signs_of_life():
    board = FakeBoard()
    processes = processes_of(board, 3)
    for beat, there in enumerate((True, True, False)):
        if beat < 2:
            board.show(2, beat=beat)
        look(processes, 11)
        assert present(processes).has_peers == there


def test_a_pause_of_this_process_is_nobodys_silence(monkeypatch):
    now = itertools.chain([3, 3.5, 3.5, 100, 100.5])
    monkeypatch.setattr(presence, "time", SimpleNamespace(monotonic=lambda: next(now)))
    clock, seconds = presence.Clock(), []
    for _ in range(4):
        clock.tick()
        seconds.append(clock.seconds)
    assert seconds == [0.5, 0.5, 1.5, 2]


def test_the_silence_of_the_service_is_not_taken_for_that_of_a_peer():
    board = FakeBoard()
    processes = processes_of(board, 3, 2)
    board.show(1, beat=1)
    assert look(processes, 0) == "" and look(processes, 1) == ""
    assert look(processes, 29.5, heard=False) == "", "its row was read for one second only"
    found = look(processes, 1, heard=False)
    assert tells(found, "process 0", "service") and "process 1" not in found


def test_after_a_signal_silence_and_the_users_code_have_shorter_limits():
    board = FakeBoard()
    processes = processes_of(board)
    for beat in range(30):
        board.show(1, beat=beat, doing="drawing batch 7", of_user=True)
        assert look(processes, 2) == ""
    processes.hurry("SIGTERM")
    board.show(1, beat=40, doing="drawing batch 7", of_user=True)
    assert look(processes, 1) == ""
    board.show(1, beat=41, doing="drawing batch 7", of_user=True)
    assert look(processes, 6) == "" and present(processes).has_peers
    board.show(1, beat=42, doing="drawing batch 7", of_user=True)
    assert tells(look(processes, 3), "process 1", "SIGTERM", "drawing batch 7")
    assert not present(processes).has_peers, "the first process does not stay for it"
    for beat in range(43, 50):
        board.show(1, beat=beat, doing="computing step 6")
        assert look(processes, 4) == "", "it may take as long as a step does"
    assert look(processes, 4) == ""
    assert tells(look(processes, 2), "process 1", "silent")
    processes.hurry("")
    assert look(processes, 4) == ""


def test_a_signal_to_a_peer_is_one_to_all():
    board = FakeBoard()
    processes = processes_of(board)
    board.show(1, ending="SIGTERM")
    look(processes, 0)
    assert present(processes).asked_to_end == "SIGTERM"
    board.show(1, ending="SIGTERM", gone=True)
    look(processes, 0)
    assert not present(processes).asked_to_end


def test_an_abort_names_the_peer_that_has_been_silent_for_the_longest():
    board = FakeBoard()
    processes = processes_of(board, 4, 0)
    for beat, peers in enumerate(((1, 2, 3), (1, 3), (3,))):
        for i in peers:
            board.show(i, beat=beat)
        look(processes, 1)
    assert tells(processes._explained_abort(True), "process 2", "node2")


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("leaves_after", [0, 3, None])
def test_a_process_ends_after_its_peers_but_not_long_after_an_error(
    index, failed, leaves_after, monkeypatch
):
    """The first process, whose end aborts its peers, gives them some seconds after an error."""
    board, naps = FakeBoard(), []
    processes: Any = processes_of(board, 2, index)
    processes._signs = SimpleNamespace(join=lambda seconds: None)

    def nap(seconds):
        naps.append(seconds)
        assert len(naps) < 1000
        # Without an error, it waits for as long as its peer shows signs of life.
        if len(naps) == leaves_after or (leaves_after is None and not failed and len(naps) == 500):
            board.show(1 - index, gone=True)
            present(processes).exchange()

    clock = SimpleNamespace(sleep=nap, monotonic=lambda: sum(naps))
    monkeypatch.setattr(of_processes, "time", clock)
    board.show(1 - index, gone=leaves_after == 0)
    present(processes).exchange()
    if failed:
        processes.give_up("a cable is cut")
    processes._wait_for_end_of_peers()
    present(processes).exchange()
    sign = json.loads(board.notes[f"{PRESENCE}{index}"])
    assert sign["gone"] and sign["failed"] == failed
    limit = 0 if failed and index else of_processes._SECONDS_FOR_PEERS if failed else 1000
    wanted = 500 if leaves_after is None else leaves_after
    last = failed and not index  # the peer has shown its last sign, but not ended
    assert len(naps) == min(wanted, round(limit / of_processes._LOOK_SECONDS)) + last


@pytest.mark.parametrize("in_jax", [True, False])
@pytest.mark.parametrize("notices", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_a_process_that_waits_in_jax_for_a_lost_peer_is_ended_late(
    in_jax, notices, asked, monkeypatch
):
    board, ended = FakeBoard(), []
    processes = processes_of(board)
    monkeypatch.setattr(processes, "_end_at_once", lambda: ended.append(True))

    def judged(seconds):
        present(processes).clock.seconds += seconds
        present(processes).exchange()
        processes._judge()
        return len(ended)

    board.show(1, beat=1)
    assert judged(0) == 0 and processes.unreachable is None
    assert judged(1000) == 0
    found = processes.unreachable
    assert tells(str(found), "process 1", "silent")
    if notices:
        with pytest.raises(PeerEndedError):
            processes.gather("a step")
    limit = of_processes._SECONDS_TO_NOTICE
    if asked:
        processes.hurry("SIGTERM")
        limit = of_processes._SECONDS_TO_NOTICE_AT_END
    with doing("computing step 4") if in_jax else nullcontext():
        assert judged(limit) == 0
        assert judged(1) == (in_jax and not notices)
    assert processes.unreachable == found


def test_a_process_goes_on_alone_if_it_is_the_first_that_is_left(monkeypatch):
    ended: list[bool] = []
    monkeypatch.setattr(of_processes.Processes, "_end_at_once", lambda self: ended.append(True))

    def left(*others: str) -> Processes:
        """Process 2 of four; what has become of the first ones, and of the last."""
        board = FakeBoard()
        processes = processes_of(board, 4, 2)
        for beat in range(3):
            for i, what in zip((0, 1, 3), others, strict=True):
                of_user = {"doing": "drawing batch 7", "of_user": what == "stuck"}
                shown = 0 if what == "silent" else beat
                board.show(
                    i,
                    beat=shown,
                    gone=what == "gone",
                    lost="" if what != "lost" else "x",
                    **of_user,
                )
            processes.hurry("SIGTERM")
            look(processes, 4)
        processes.give_up("a peer is lost")
        with pytest.raises(PeerEndedError):
            processes.gather("a step")
        return processes

    for others in (("there", "gone", "gone"), ("silent", "there", "gone")):
        with pytest.raises(PeerEndedError), left(*others).going_on_alone():
            pass
    for others in itertools.product(("silent", "gone", "lost", "stuck"), repeat=2):
        with left(*others, "there").going_on_alone():
            pass
    processes = left("there", "gone", "gone")
    present(processes).has_lost_service = True
    with processes.going_on_alone():
        present(processes).clock.seconds += of_processes._SECONDS_TO_NOTICE + 1
        processes._judge()
        assert ended, "it waits for a peer in JAX"
    processes._judge()
    assert len(ended) == 1 and processes.is_first and processes.index == 2
    assert processes.gather("a step", 5) == [5] * 4
    assert source.joined_positions({"batches": 3, "state": {"x": 1}}, processes) == {
        "batches": 3,
        "state": None,
    }
    processes.lose("OutOfMemory")
    with pytest.raises(PeerEndedError), processes.going_on_alone():
        pass


def test_a_process_that_can_not_tell_its_peers_of_its_end_is_ended(monkeypatch):
    board, ended = FakeBoard(), []
    processes = processes_of(board)
    monkeypatch.setattr(processes, "_end_at_once", lambda: ended.append(True))

    def write(key: str, text: bytes) -> None:
        processes.give_up("JAX's service is gone")
        present(processes).clock.seconds += of_processes._SECONDS_TO_NOTICE + 1
        processes._judge()

    monkeypatch.setattr(board, "write", write)
    processes.leave("an error")
    assert ended


def test_the_seconds_of_all_waits_are_counted(monkeypatch):
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks), monotonic=time.monotonic)
    monkeypatch.setattr(of_processes, "time", clock)
    processes = processes_of(FakeBoard({1: {"where": "a step", "value": None}}))
    for _ in range(3):
        processes.gather("a step")
    assert processes.waited == 3


def test_a_wait_in_jax_for_a_peer_without_state_has_a_limit():
    board = FakeBoard()
    processes = processes_of(board)
    board.show(1, beat=1)
    look(processes, 0)
    with doing("computing step 4"):
        board.show(1, beat=2, lost="OutOfMemory: all of it")
        assert look(processes, 9) == ""
        board.show(1, beat=3, lost="OutOfMemory: all of it")
        assert look(processes, 9) == ""
        progressed()  # as long as this process gets on, it isn't stuck
        board.show(1, beat=4, lost="OutOfMemory: all of it")
        assert look(processes, 3) == ""
        board.show(1, beat=5, lost="OutOfMemory: all of it")
        assert look(processes, 9) == ""
        board.show(1, beat=6, lost="OutOfMemory: all of it")
        assert tells(look(processes, 3), "process 1", "OutOfMemory: all of it")
        present(processes).waits = True
        assert look(processes, 0) == "", "it notices by itself"


@pytest.fixture
def service() -> Iterator[CoordinationService]:
    """JAX's own coordination service, of this process alone."""
    address = f"localhost:{free_port()}"
    running = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0)
    client.connect()
    with mock.patch.object(global_state, "client", client):
        yield CoordinationService()
    client.shutdown()
    running.shutdown()


def test_notes_are_those_of_a_folder_until_they_are_deleted(service):
    for key, text in (("a/1", b"old"), ("a/1", b"new"), ("a/2", b"\x00"), ("ab/1", b"other")):
        service.write(key, text)
    assert service.read("a") == {"1": b"new", "2": b"\x00"} and service.read("b") == {}
    service.wait("a/3", 0.001)
    service.wait("a/2", 60)
    service.erase("a")
    assert service.read("a") == {} and service.read("ab") == {"1": b"other"}


def test_a_service_that_is_gone_is_a_lost_connection(service, monkeypatch):
    def lost(*given, **options):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: its host\nis gone")

    names = "key_value_set_bytes", "key_value_dir_get_bytes", "key_value_delete"
    gone: Any = dict.fromkeys((*names, "blocking_key_value_get_bytes"), lost)
    calls = [
        lambda: service.write("a/1", b"x"),
        lambda: service.read("a"),
        lambda: service.wait("a/1", 1),
        lambda: service.erase("a"),
    ]
    for client in (SimpleNamespace(**gone), None):
        monkeypatch.setattr(global_state, "client", client)
        for call in calls:
            with pytest.raises(
                ConnectionError, match="its host is gone" if client else "shut down"
            ):
                call()


def test_processes_on_the_service_wait_for_each_other(service, monkeypatch):
    # Threads that wait at once put each other's activity back; a process has one such thread.
    monkeypatch.setattr(HERE, "doing", HERE.doing)

    def values(index):
        processes = processes_of(service, 3, index)
        return [processes.gather(f"step {n}", [index, n]) for n in range(40)]

    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(values, range(3))]
    assert found == [[[[i, n] for i in range(3)] for n in range(40)]] * 3


def test_a_call_of_a_board_that_does_not_answer_ends_and_the_next_ones_keep_their_order(
    monkeypatch,
):
    monkeypatch.setattr(coordination, "_CALL_SECONDS", 0.01)
    board, answers = FakeBoard(), threading.Event()
    read = board.read

    def slow(folder: str) -> dict[str, bytes]:
        answers.wait()
        return read(folder)

    board.read = slow
    bounded = coordination.BoundedBoard(board)
    for call in (lambda: bounded.read("a"), lambda: bounded.write("a/1", b"cancelled")):
        with pytest.raises(ConnectionError):
            call()
    monkeypatch.setattr(coordination, "_CALL_SECONDS", 60.0)
    answers.set()
    assert bounded.read("a") == {}, "what has come too late is not made"
    bounded.write("a/1", b"new")
    assert bounded.read("a") == {"1": b"new"}
    board.is_lost = True
    with pytest.raises(ConnectionError, match="is lost"):
        bounded.erase("a")


class OnceLost(FakeBoard):
    """A board that can't be reached from its first write or read on, until somebody sleeps."""

    def __init__(self, method: str):
        super().__init__({1: {"where": "a step", "value": 5}})
        self._method = method
        setattr(self, method, self._fail)

    def _fail(self, *given):
        raise ConnectionError("a cable is cut")

    def sleep(self, seconds):
        self.__dict__.pop(self._method, None)


@pytest.mark.parametrize("method", ["write", "read"])
def test_messages_come_through_once_the_service_is_there_again(method, monkeypatch):
    board = OnceLost(method)
    clock = SimpleNamespace(perf_counter=time.perf_counter, monotonic=time.monotonic)
    monkeypatch.setattr(of_processes, "time", SimpleNamespace(**vars(clock), sleep=board.sleep))
    assert processes_of(board).gather("a step", 4) == [4, 5]


@pytest.mark.parametrize("index", range(1, 4))
def test_the_first_process_of_those_that_wait_tells_once_for_whom(index, monkeypatch, capsys):
    board = FakeBoard({i: {"where": "a step", "value": i} for i in range(1, 4) if i != index})
    processes = processes_of(board, 4, index)
    board.show(0, doing="drawing batch 7")
    look(processes, 0)
    ticks = itertools.count(0, 25)
    clock = SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: next(ticks))
    monkeypatch.setattr(of_processes, "time", clock)
    with pytest.raises(AssertionError, match="nobody writes"):
        processes.gather("a step", index)
    said = capsys.readouterr().err
    assert said.count("node0") == (index == 1)
    assert index > 1 or tells(said, "process 0", "a step", "drawing batch 7", "60 s")


def test_a_further_run_takes_back_how_the_last_one_ended():
    board = FakeBoard()
    processes = processes_of(board)

    def shown():
        present(processes).exchange()
        sign = json.loads(board.notes[f"{PRESENCE}0"])
        return sign["ending"], sign["lost"]

    processes.hurry("SIGTERM")
    processes.lose("OutOfMemory")
    assert shown() == ("SIGTERM", "OutOfMemory")
    processes.begin_run()
    assert shown() == ("", "")


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_last_sign_of_life_comes_after_the_end(is_lost):
    board = FakeBoard()
    processes: Any = processes_of(board)
    waits: list[float] = []

    def wait(seconds):
        waits.append(seconds)
        processes._is_over, present(processes).gone, board.is_lost = True, True, is_lost

    processes._changed = SimpleNamespace(wait=wait, clear=lambda: None)
    processes._show_signs()
    assert len(waits) == 1, "it ends with a last sign, without a wait"
    sign = json.loads(board.notes[f"{PRESENCE}0"])
    assert (sign["beat"], sign["gone"]) == ((1, False) if is_lost else (2, True))


@pytest.mark.parametrize("hosts", ["aaa", "aba", "abb"])
def test_a_process_counts_those_of_its_host_as_it_connects(hosts, monkeypatch):
    where = "the first run of several processes"
    board = FakeBoard({i: {"where": where, "value": hosts[i]} for i in (1, 2)})
    processes, started, at_exit, explained = processes_of(board, 3), [], [], []
    processes._signs = SimpleNamespace(start=lambda: started.append("signs"))  # type: ignore
    threads = SimpleNamespace(
        current_thread=threading.current_thread,
        main_thread=threading.main_thread,
        Thread=lambda target, **_: SimpleNamespace(start=lambda: started.append(target)),
    )
    monkeypatch.setattr(of_processes, "threading", threads)
    monkeypatch.setattr(of_processes, "atexit", SimpleNamespace(register=at_exit.append))
    monkeypatch.setattr(of_processes, "explain_aborts", explained.append)
    monkeypatch.setattr(of_processes, "memory_owner", lambda: hosts[0])
    processes.connect()
    assert processes.num_here == hosts.count(hosts[0])
    assert started == ["signs", processes._look] and at_exit == [processes._leave_for_good]
    assert explained == [processes._explained_abort]


@pytest.fixture
def ended(monkeypatch) -> list[tuple[str, int, bool]]:
    """How a process ends itself: its words, its status, and whether it shows its stacks."""
    found: list[tuple[str, int, bool]] = []

    def end(text, status=1, *, stacks=True):
        found.append((text, status, stacks))

    monkeypatch.setattr(of_processes, "end", end)
    monkeypatch.setattr(of_processes.Processes, "_wait_for_end_of_peers", lambda self: None)
    monkeypatch.setattr(of_processes.logging, "shutdown", lambda: None)
    return found


@pytest.mark.parametrize("own", ["", "unreachable", "raised"])
@pytest.mark.parametrize("peer_failed", [False, True])
@pytest.mark.parametrize("is_stuck", [False, True])
def test_after_an_error_of_any_process_none_waits_for_jaxs_end(
    own, peer_failed, is_stuck, ended, monkeypatch
):
    board = FakeBoard()
    processes: Any = processes_of(board)
    processes._signs = SimpleNamespace(is_alive=lambda: is_stuck)
    processes.status = 143
    board.show(1, gone=True, failed=peer_failed)
    look(processes, 0)
    if own == "unreachable":
        processes.give_up("a cable is cut")
    monkeypatch.setattr(sys, "last_value", ValueError() if own == "raised" else None, raising=False)
    processes._leave_for_good()
    if not (own or peer_failed or is_stuck):
        assert not ended, "JAX may end as ever"
        return
    ((text, status, stacks),) = ended
    assert (status, stacks) == (143, False)
    named = {
        "unreachable": "a cable is cut",
        "raised": "",
        "": "process 1" if peer_failed else "peer",
    }
    assert named[own] in text and bool(text) == (own != "raised")


def test_peers_are_told_by_which_error_a_script_ends(monkeypatch):
    processes = processes_of(FakeBoard(), 2, 1)
    processes._signs = cast(Any, SimpleNamespace(join=lambda seconds: None))
    monkeypatch.setattr(sys, "last_value", ValueError("a wrong\nvalue"), raising=False)
    processes._wait_for_end_of_peers()
    assert present(processes).why == "ValueError: a wrong value"


@pytest.mark.parametrize("count", [1, 2])
def test_a_process_without_its_main_thread_tells_why_and_takes_no_part_in_jaxs_end(
    count, ended, monkeypatch
):
    monkeypatch.undo()
    monkeypatch.setattr(
        of_processes, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
    )
    monkeypatch.setattr(of_processes.logging, "shutdown", lambda: None)
    monkeypatch.setattr(
        of_processes, "end", lambda text, status: ended.append((text, status, True))
    )
    board = FakeBoard()
    held = processes_of(board, 2, 1) if count == 2 else Processes()
    held._signs = cast(Any, SimpleNamespace(join=lambda seconds: None))
    held.status = 143
    held.end_held("it was drawing batch 7")
    ((text, status, _),) = ended
    assert tells(text, "drawing batch 7") and status == 143
    if count == 2:
        present(held).exchange()
        peer = processes_of(board)
        look(peer, 0)
        assert tells(present(peer).failures, "process 1", "drawing batch 7")
        assert not present(held).failures


def test_what_a_process_did_in_jax_is_told_as_it_is_ended(ended):
    processes = processes_of(FakeBoard())
    processes.saved, processes.status = "Step 4 is saved in there.", 143
    processes.give_up("a cable is cut")
    with doing("computing step 6"):
        processes._end_at_once()
    ((text, status, stacks),) = ended
    assert tells(text, "a cable is cut", "computing step 6", "Step 4") and (status, stacks) == (
        143,
        True,
    )


@pytest.mark.parametrize("is_own", [False, True])
def test_an_abort_of_jaxs_thread_lets_the_run_end_by_an_error(is_own):
    processes = processes_of(FakeBoard(), 2, 1)
    processes.saved = "Step 4 is saved in there."
    assert tells(processes._explained_abort(is_own), "process 0", "Step 4")
    assert present(processes).has_lost_service != is_own
    assert (processes.unreachable is None) == is_own
