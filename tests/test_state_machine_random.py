"""Random state machine: Hypothesis interleaves every verb on a few requests and shrinks what fails."""

import numpy as np
import pytest
from fixtures import PROMPT, fs_spec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machine import Machine

REQUESTS = 4
subsets = st.sets(st.integers(0, REQUESTS - 1), min_size=1).map(lambda s: np.array(sorted(s)))
PROFILE = settings(
    max_examples=12,
    stateful_step_count=10,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class Verbs(RuleBasedStateMachine):
    """Verbs in any legal order; `check` compares all requests with the oracle after each."""

    spec = None

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed):
        self.m = Machine(self.spec, REQUESTS, seed=seed)

    @rule(
        windows=st.lists(st.integers(0, 4).flatmap(lambda t: st.tuples(st.just(t), st.integers(0, t))), min_size=4, max_size=4)
    )
    def round(self, windows):
        widths, accepts = np.array(windows).T
        if widths.any():
            self.m.round(widths, accepts)

    @rule(rows=subsets)
    def decode(self, rows):
        one = np.isin(np.arange(REQUESTS), rows).astype(int)
        self.m.round(one, one)

    @rule(rows=subsets)
    def merge(self, rows):
        self.m.merge(rows)

    @rule(rows=subsets)
    def move(self, rows):
        self.m.move(rows)

    @rule(rows=subsets)
    def clear(self, rows):
        self.m.clear(rows)

    @rule(rows=subsets, n=st.integers(0, PROMPT))
    def prompt(self, rows, n):
        self.m.prompt(rows, (rows + n) % (PROMPT + 1))

    @invariant()
    def equals_the_oracle(self):
        if hasattr(self, "m"):
            self.m.check()


@pytest.mark.parametrize(("rule_name", "mode"), [("gdn", "replay"), ("kda", "native"), ("gdn", "compact")])
def test_any_order_of_verbs(rule_name, mode):
    """R18 and faults.md section 4, item 1, at random."""
    machine = type("Verbs", (Verbs,), {"spec": fs_spec(rule_name, mode)})
    case = machine.TestCase
    case.settings = PROFILE
    case().runTest()
