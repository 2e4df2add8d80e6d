"""Compares stages that compute the same with different numbers, so that they share a template.

The template takes these numbers as inputs. An operand may differ if it is a literal, a constant of
up to 1,024 elements, or a value from outside. It may also be a literal inside a `remat`, which then
becomes an operand of it. Operands that decide which computation takes place stay in the template.

Example: the equations of `x + tanh(x @ w0) / 1` and `x + tanh(x @ w1) / 3` are (row: operands)

    0: dot x w   1: tanh 0   2: div 1 n   3: add x 2

Their skeletons are equal: `x` and `n` appear there as a dtype and a shape. The slots are `(x of
one, x of the second)` at row 0, column 0 and row 3, column 0, and `(1.0, 3.0)` at row 2,
column 1. Each slot becomes one input: `x` is one already, `n` is new, and the prologue makes it.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jax.extend import core as jex

from megatrain_jax._src.engine.program import jaxpr as jx
from megatrain_jax._src.engine.program.loss.partition import SMALL
from megatrain_jax._src.engine.program.primitives import DECIDING, REMAT
from megatrain_jax._src.engine.program.structural_key import form, value_key

Position = tuple[int, int]  # row of an equation in its body, column of an operand


class StageComparer:
    """Compares bodies, the lists of equations of stages, given the values of their constants."""

    def __init__(self, consts: Mapping[Any, Any]):
        """Takes the values of the constants that equations may read."""
        self.consts = consts

    def skeleton(self, eqns: Sequence[Any], is_input: Callable[[Any], bool]) -> Hashable:
        """A key of a body's computation that ignores the operands that may differ.

        Args:
            eqns: A body, in order.
            is_input: Whether a variable comes from outside the body.
        """
        numbers: dict[Any, int] = {}

        def ref(eqn, atom):
            # By dtype and shape only. A weak type is left out, because an input has none.
            if self._may_differ(eqn, atom) or not jx.is_literal(atom) and is_input(atom):
                return str(getattr(atom.aval, "dtype", "")), getattr(atom.aval, "shape", ())
            if jx.is_literal(atom):
                return value_key(atom.val)
            return numbers.setdefault(atom, len(numbers))

        rows = []
        for eqn in eqns:
            refs = tuple(ref(eqn, a) for a in eqn.invars)
            rows.append((form(eqn), refs, tuple(str(v.aval) for v in eqn.outvars)))
            for v in eqn.outvars:
                numbers.setdefault(v, len(numbers))
        return tuple(rows)

    def slots(
        self, rows: Sequence[tuple[Any, ...]], are_inputs: Sequence[Callable[[Any], bool]]
    ) -> list[tuple[tuple[Any, ...], list[Position]]]:
        """Finds the slots: operands from outside, and literals or constants that differ.

        Args:
            rows: The first equation of each body, the second of each, and so on.
            are_inputs: For each body, whether a variable comes from outside it.

        Returns:
            For each slot, its operand in each body and all its positions.
        """
        places: dict[tuple, list[Position]] = defaultdict(list)
        atoms_of: dict[tuple, tuple[Any, ...]] = {}
        for row, eqns in enumerate(rows):
            for column, atoms in enumerate(zip(*(e.invars for e in eqns), strict=True)):
                # Positions with the same operands in every body are one slot, so `x * x` takes one
                # input. If one body has two different operands there, all bodies take two inputs.
                key = tuple(map(self._key, atoms))
                inputs = any(
                    not jx.is_literal(a) and is_input(a)
                    for a, is_input in zip(atoms, are_inputs, strict=True)
                )
                fixed = all(self._may_differ(eqns[0], a) for a in atoms)
                if inputs or fixed and len(set(key)) > 1:
                    places[key].append((row, column))
                    atoms_of[key] = atoms
        return [(atoms_of[key], positions) for key, positions in places.items()]

    def _may_differ(self, eqn, atom) -> bool:
        """Whether an operand is a literal or small constant that decides no computation."""
        if jx.is_literal(atom):
            return eqn.primitive.name not in DECIDING
        return atom in self.consts and jx.num_elements(atom.aval) <= SMALL

    def _key(self, atom) -> Hashable:
        if jx.is_literal(atom):
            return value_key(atom.val)
        return value_key(self.consts[atom]) if atom in self.consts else id(atom)


def hoist_remat_literals(eqns: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turns literals in which like remats differ into operands of the remats.

    Args:
        eqns: One equation of each body, all in the same row.

    Returns:
        The same equations, or remats with equal bodies; nested remats are treated likewise.
    """
    if eqns[0].primitive.name not in REMAT:
        return eqns
    bodies = [eqn.params["jaxpr"] for eqn in eqns]
    rows = [hoist_remat_literals(row) for row in zip(*(b.eqns for b in bodies), strict=True)]
    slots = StageComparer({}).slots(rows, [lambda v: False] * len(eqns))
    changed = []
    for m, (eqn, body) in enumerate(zip(eqns, bodies, strict=True)):
        inner = [row[m] for row in rows]
        literals = [atoms[m] for atoms, _ in slots]
        new = [jex.Var(a.aval) for a in literals]
        for var, (_, positions) in zip(new, slots, strict=True):
            substitute(inner, positions, var)
        body = body.replace(invars=[*body.invars, *new], eqns=inner)
        # These operands are literals of the stage, and `slots` compares them next, so they become
        # inputs of its template.
        changed.append(
            eqn.replace(invars=[*eqn.invars, *literals], params={**eqn.params, "jaxpr": body})
        )
    return tuple(changed)


def substitute(eqns: list[Any], positions: Sequence[Position], var: Any) -> None:
    """Replaces the operands at some positions by a variable, in place."""
    for row, column in positions:
        invars = list(eqns[row].invars)
        invars[column] = var
        eqns[row] = eqns[row].replace(invars=invars)
