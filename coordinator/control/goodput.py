"""Net throughput: what a plan brings its session, minus what the other sessions of its verifier lose by it.

A verifier that several sessions share chooses among their guesses itself, see `outrider.speculation.goodput`.
"""

from __future__ import annotations

from coordinator.control.throughput_model import (
    Conditions,
    SpeculationPlan,
    draft_wait_ms,
    guesses_per_step,
    mean_acceptance,
    throughput,
)

PAYING_NODES = 32


def paying_nodes(plan: SpeculationPlan, before: int = 0) -> int:
    """Return how many guesses a verifier with other sessions may check if they pay; 0: those of the plan.

    It does so for a plan without guesses too, if the session had guesses `before`: the verifier may still have some.
    """
    may_choose = before > 0
    if plan.gamma:
        may_choose = plan.ahead and not plan.awaited
    return PAYING_NODES if may_choose else 0


def net_throughput(conditions: Conditions, plan: SpeculationPlan) -> float:
    """Return the expected tokens per second of this session minus those that other sessions on the verifier lose.

    They lose throughput because our draft tokens lengthen the shared step. The other sessions are assumed to move
    halfway towards the same plan. Otherwise the first session would keep all batch tokens that are free now.
    """
    if plan.gamma == 0 or conditions.other_sessions <= 0.0:
        return throughput(conditions, plan)
    likewise = conditions.other_sessions * (1.0 + guesses_per_step(plan))
    tokens = max(conditions.other_tokens, (conditions.other_tokens + likewise) / 2)
    if conditions.shared and paying_nodes(plan):
        tokens = conditions.other_sessions  # the verifier chooses among the guesses of all by what they bring
    network_ms = conditions.network_ms
    if conditions.shared and not plan.ahead:  # until our guesses are there, it has begun a step with the others
        drafting_ms = plan.gamma * conditions.draft_step_ms(plan.branches)
        network_ms = max(network_ms, conditions.cost.at(tokens) - drafting_ms)
    shared = conditions._replace(other_tokens=tokens, network_ms=network_ms)
    return throughput(shared, plan) - 1000.0 * conditions.other_tokens_per_ms * _delay_share(shared, plan)


def _delay_share(conditions: Conditions, plan: SpeculationPlan) -> float:
    """Return the share of time by which our guesses delay shared steps."""
    wait_ms = draft_wait_ms(conditions, plan.gamma, plan.branches)
    if plan.ahead:  # the verifier waits only after a miss, if at all
        missed = 1.0 - mean_acceptance(conditions.acceptance_of(plan))
        wait_ms = missed * draft_wait_ms(conditions, plan.awaited, plan.branches) if plan.awaited else 0.0
    step_ms = conditions.verify_ms(guesses_per_step(plan))
    delay_ms = max(0.0, step_ms - conditions.verify_ms(0))
    if conditions.shares_cores:  # shared steps are slower while it drafts
        delay_ms += plan.gamma * conditions.draft_step_ms(plan.branches)
    return conditions.proposal_rate * delay_ms / max(step_ms + wait_ms, 1e-6)
