"""Checkpoints in a simulated S3, over HTTP; see also `test_object_stores`."""

import numpy as np
import pytest

import megatrain_jax as mt
import small
from megatrain_jax._src.common import object_paths
from megatrain_jax._src.common.object_paths import ObjectPath
from megatrain_jax._src.engine.checkpoint.object_workspace import ObjectWorkspace
from messages import refuses
from object_server import s3_server
from runs import check_same_bits

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("started_once")]


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("moto.server", reason="needs pip install 'moto[server]'")
    with s3_server() as environment:
        yield environment


@pytest.fixture
def in_s3(server, monkeypatch):
    for name, value in server.items():
        monkeypatch.setenv(name, value)


def test_a_run_in_s3_goes_on_and_damage_is_noticed(in_s3):
    place = ObjectPath("s3", "bucket", "my/run")
    for steps in (4, 6):
        result = small.fit(str(place), steps, checkpoint_every=2, keep=2)
    assert small.losses(result) == small.expected(6)
    assert sorted(path.name for path in place.iterdir()) == ["4", "6"]
    array = np.asarray(result.trainer.params[1]["w"]).tobytes()
    files = [place / "6" / name for name in (place / "6").files()]
    file = next(file for file in files if array in file.read_bytes())
    file.write_bytes(file.read_bytes().replace(array, array[:-1] + bytes([array[-1] ^ 1])))
    with refuses(mt.CheckpointError, "params/1/w", "differs"):
        result.trainer.restore(str(place / "6"))
    with pytest.warns(UserWarning, match="Resumed from step 4"):
        result = small.fit(str(place), 8)
    assert small.losses(result) == small.expected(8)
    check_same_bits(mt.load(str(place))["0"], result.trainer.params[0])


def test_a_lock_in_s3_has_one_holder(in_s3):
    place = ObjectPath("s3", "bucket", "locked")
    workspace = ObjectWorkspace(place / "w", str(place))
    file = place / "w" / "lock"
    _, new = (place / "none").read_version()
    assert file.write_if(b"mine", new) is None, "it is there already"
    _, version = file.read_version()
    workspace.check()
    assert file.write_if(b"mine", version) is None, "it was written anew since"
    workspace.release(run=True)
    assert not place.files()


def test_a_missing_bucket_and_missing_credentials_are_told(in_s3, monkeypatch):
    with refuses(mt.CheckpointError, "`checkpoint_dir`=s3://none/run", "bucket", "none"):
        small.fit("s3://none/run", 1)
    with monkeypatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        object_paths._opened.cache_clear()
        object_paths.shared_context.cache_clear()
        with refuses(mt.CheckpointError, "s3://bucket/run", "AWS_ACCESS_KEY_ID"):
            small.fit("s3://bucket/run", 1)
    object_paths._opened.cache_clear()
    object_paths.shared_context.cache_clear()
