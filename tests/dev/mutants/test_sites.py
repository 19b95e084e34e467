# SPDX-License-Identifier: Apache-2.0
"""Tests of the operators: which changes they make, and how a mutation is identified."""

from __future__ import annotations

import textwrap

import pytest

from kvconform.dev.mutants.mutation import Mutation, Site
from kvconform.dev.mutants.sites import mutations_of


def made(source: str, operator: str | None = None) -> list[Mutation]:
    """The mutations of a source, or those of one operator."""
    found = mutations_of(textwrap.dedent(source).encode(), "m")
    return [each for each in found if operator in (None, each.site.operator)]


def added(source: str, operator: str) -> list[str]:
    """The lines that an operator writes into a source."""
    lines = [line for each in made(source, operator) for line in each.diff() if line[0] == "+"]
    return [line[1:].strip() for line in lines]


@pytest.mark.parametrize(
    "operator, body, expected",
    [
        ("boundary", "return a < b", ["return a <= b"]),
        ("boundary", "return a >= b", ["return a > b"]),
        ("equality", "return a == b", ["return a != b"]),
        ("equality", "return a is not b", ["return a is  b"]),
        ("equality", "return a in b", ["return a not in b"]),
        ("negate", "return 1 if a < b else 2", ["return 1 if (not (a < b)) else 2"]),
        ("negate", "return [x for x in a if not x]", ["return [x for x in a if (x)]"]),
        ("and-or", "return (a or b) and c", ["return (a or b) or c", "return (a and b) and c"]),
        ("arithmetic", "return a + b", ["return a - b"]),
        ("arithmetic", "return a + 'text'", []),
        ("one-more", "return a[2]", ["return a[3]"]),
        ("one-less", "return a[:b]", ["return a[:(b - 1)]"]),
        ("swap-arguments", "return f(a, b)", ["return f(b, a)"]),
        ("swap-arguments", "return f(a, a)", []),
        ("empty", "return [a]", ["return []"]),
        ("empty", "return frozenset(a)", ["return frozenset()"]),
        ("drop-statement", "self.x.add(a)", ["pass"]),
        ("drop-statement", "logger.info(a)", []),
        ("drop-component", "return f((a, b))", ["return f((b,))", "return f((a,))"]),
        ("drop-component", "return digest(a, b)", ["return digest(b)", "return digest(a)"]),
        ("drop-component", "x, y = a, b", []),
        ("shorten", "return list(a)", ["return list(a)[1:]", "return list(a)[:-1]"]),
        ("drop-wait", "self.thread.join()", ["pass"]),
        ("keep-state", "return self.x.pop(a, None)", ["return self.x.get(a, None)"]),
    ],
)
def test_an_operator_changes_one_thing(operator: str, body: str, expected: list[str]) -> None:
    assert added(f"def f(self, a, b, c):\n    {body}\n", operator) == expected


def test_loops_skip_their_first_or_last_step() -> None:
    source = """
        def f(layers):
            for layer in layers:
                save(layer)
        """
    assert added(source, "skip") == [
        "for layer in list(layers)[1:]:",
        "for layer in list(layers)[:-1]:",
    ]


def test_a_statement_that_forgets_has_an_operator_of_its_own() -> None:
    source = """
        def _forget_preempted(self, ids):
            self.dropped |= ids
        """
    assert added(source, "keep-state") == ["pass"]
    assert made(source, "drop-statement") == []


def test_reports_are_made_never_late_twice_and_early() -> None:
    source = """
        class C:
            def get_finished(self, finished):
                return set(), None
        """
    decorators = {
        line.rpartition(".")[2]
        for name in ("never", "late", "twice", "early")
        for line in added(source, f"report-{name}")
    }
    assert decorators == {"never", "late", "twice", "early"}


def test_neighbours_are_swapped_only_if_one_changes_what_the_other_reads() -> None:
    source = """
        def f(self):
            self.a = self.n
            self.n += 1
            self.b = 2
        """
    assert [each.site.line for each in made(source, "swap-statements")] == ["self.a = self.n"]


def test_a_lock_is_dropped() -> None:
    source = """
        def f(self):
            with self._lock:
                self.n += 1
        """
    assert added(source, "drop-lock") == ['with __import__("contextlib").nullcontext():']


def test_what_does_not_run_is_left_alone() -> None:
    source = '''
        """Docs: 1 < 2."""
        import a, b

        if TYPE_CHECKING:
            x = 1 < 2

        Pair = tuple[1, 2] | None


        def f(n: dict[1, 2]) -> tuple[1, 2]:
            """Docs."""
            assert n < 1, 2


        def kvconform_fail_load(self, req, n):
            self.failing[req] = n + 1
        '''
    assert made(source) == []


def test_arguments_whose_order_is_free_are_not_swapped() -> None:
    source = """
        def f(a, b):
            return max(a, b) + min(a, b) + pow(a, b)
        """
    assert added(source, "swap-arguments") == ["return max(a, b) + min(a, b) + pow(b, a)"]


def test_every_mutant_compiles_and_no_two_are_equal() -> None:
    source = """
        def f(self, a, b):
            if a < b and b > 2:
                return [each for each in (a, b) if each]
            self.x.pop(a, None)
            return {a: b}
        """
    found = made(source)
    programs = [each.mutated for each in found]
    assert len(found) > 15
    assert len(set(programs)) == len(programs)
    for program in programs:
        compile(program, "<mutant>", "exec")


def test_the_identity_survives_changes_elsewhere() -> None:
    function = "def f(a, b):\n    return a < b\n"
    before = made(function, "boundary")
    after = made(f"# A line.\ndef g(a):\n    return a < 3\n\n\n{function}", "boundary")
    assert before[0].site == Site("m", "f", "boundary", "return a < b")
    assert before[0].site in [each.site for each in after]


def test_equal_lines_of_a_function_are_told_apart() -> None:
    source = """
        def f(a):
            g(a < 1)
            g(a < 1)
        """
    assert [each.site.occurrence for each in made(source, "boundary")] == [0, 1]


def test_lines_are_those_that_run_before_the_change_matters() -> None:
    source = """
        LIMIT = 3


        def f(a):
            x = g(
                a,
                2,
            )
            if a < 1:
                return x
            return LIMIT
        """
    lines = {each.site.operator + each.site.line: each.lines for each in made(source)}
    assert lines["one-moreLIMIT = 3"] is None
    assert lines["one-more2,"] == (6, 9)
    assert lines["boundaryif a < 1:"] == (10, 10)
