"""The guess tree: guesses that fit, whatever their order, and nothing that does not."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.speculation import NO_GUESS, WHOLE, Distribution, Guess, SourceTally
from outrider.speculation import tree as tree_module
from outrider.speculation.tree import GuessTree, Node, tallies

EVERYTHING = 10_000


def tree_over(committed: list[int], *, single: bool = False, max_nodes: int = 100, max_ahead: int = 100) -> GuessTree:
    return GuessTree(committed, single=single, max_nodes=max_nodes, max_ahead=max_ahead)


def chain(position: int, first_id: int, *tokens: int, parent: int = 0, source: int = 0) -> Guess:
    return Guess(position, first_id, parent, tokens, source=source)


def commit(tree: GuessTree, committed: list[int], *tokens: int) -> None:
    committed.extend(tokens)
    tree.commit(tokens)


def paths(tree: GuessTree) -> set[tuple[int, ...]]:
    """Every node as the tokens that lead to it."""
    block = tree.block(EVERYTHING, EVERYTHING)
    return {tuple(block.paths[row]) for row in range(1, len(block.tokens) + 1)}


def all_nodes(tree: GuessTree) -> list[Node]:
    return tree.nodes(tree.block(EVERYTHING, EVERYTHING))


def tallies_of(tree: GuessTree, block: Guess, accepted: Sequence[int]) -> tuple[SourceTally, ...]:
    return tallies(tree.nodes(block), block.shape.depths, accepted)


# --- one case each ---------------------------------------------------------------------------------------------------


def test_a_chain_becomes_a_chain() -> None:
    tree = tree_over([1, 2])
    assert tree.add(chain(2, 1, 7, 8, 9)) == 3
    assert (tree.block(9, 9).tokens, tree.block(9, 9).shape.parents) == ((7, 8, 9), (-1, 0, 1))
    assert tree._size == tree.depth == 3


def test_a_later_guess_hangs_from_an_earlier_one() -> None:
    tree = tree_over([1])
    tree.add(chain(1, 1, 7, 8))
    assert tree.add(chain(3, 3, 9, parent=2)) == 1
    assert tree.add(chain(2, 4, 5, parent=1)) == 1
    assert paths(tree) == {(7,), (7, 8), (7, 8, 9), (7, 5)}


def test_a_whole_tree_in_one_guess() -> None:
    tree = tree_over([1])
    assert tree.add(Guess(1, 1, 0, (7, 5, 8, 6, 9), parents=(-1, -1, 0, 0, 2))) == 5
    assert paths(tree) == {(7,), (5,), (7, 8), (7, 6), (7, 8, 9)}
    assert tree.add(Guess(3, 6, 4, (4, 3), parents=(-1, -1))) == 2, "ids are given in the order of the tokens"
    assert {(7, 6, 4), (7, 6, 3)} <= paths(tree)


def test_a_late_tree_is_skipped_forward_branch_by_branch() -> None:
    committed = [1]
    tree = tree_over(committed)
    commit(tree, committed, 7, 8)
    assert tree.add(Guess(1, 1, 0, (5, 7, 6, 8, 9, 4), parents=(-1, -1, 1, 1, 3, 0))) == 1
    assert paths(tree) == {(9,)}
    tree.add(Guess(3, 7, 4, (2,)))
    assert paths(tree) == {(9,), (2,)}, "a committed guess can be hung from by its id"


def test_what_is_there_already_is_not_stored_twice_and_both_ids_work() -> None:
    tree = tree_over([1])
    tree.add(chain(1, 1, 7, 8))
    assert tree.add(chain(1, 10, 7, 8, source=1)) == 0
    tree.add(chain(3, 3, 5, parent=2))
    tree.add(chain(3, 12, 6, parent=11, source=1))
    assert paths(tree) == {(7,), (7, 8), (7, 8, 5), (7, 8, 6)}


def test_a_late_guess_is_skipped_forward() -> None:
    committed = [1, 2]
    tree = tree_over(committed)
    commit(tree, committed, 7, 8)
    assert tree.add(chain(2, 1, 7, 8, 9)) == 1
    assert paths(tree) == {(9,)}


def test_a_late_guess_that_did_not_come_true_is_dropped() -> None:
    committed = [1, 2]
    tree = tree_over(committed)
    commit(tree, committed, 7, 8)
    assert tree.add(chain(2, 1, 7, 5, 9)) == 0
    assert tree._size == 0


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_a_late_guess_must_be_right_all_the_way(wrong: int) -> None:
    committed = [1, 2]
    tree = tree_over(committed)
    commit(tree, committed, 5, 6, 7, 8)
    tokens = [5, 6, 7, 8, 9]
    tokens[wrong] = 0
    assert tree.add(chain(2, 1, *tokens)) == 0
    assert tree._size == 0


def test_a_guess_can_hang_from_a_committed_one() -> None:
    committed = [1]
    tree = tree_over(committed)
    tree.add(chain(1, 1, 7, 8))
    commit(tree, committed, 7, 8, 9)
    assert tree.add(chain(3, 3, 9, 4, parent=2)) == 1
    assert paths(tree) == {(4,)}


def test_a_guess_can_hang_from_one_that_was_skipped_over() -> None:
    committed = [1]
    tree = tree_over(committed)
    commit(tree, committed, 7)
    tree.add(chain(1, 1, 7))
    assert tree.add(chain(2, 2, 8, parent=1)) == 1


def test_a_guess_that_hangs_from_a_pruned_one_is_ignored() -> None:
    committed = [1]
    tree = tree_over(committed)
    tree.add(chain(1, 1, 7, 8))
    commit(tree, committed, 6)
    assert tree.add(chain(3, 3, 9, parent=2)) == 0
    assert tree._size == 0


def test_a_pass_is_noted() -> None:
    tree = tree_over([1, 2])
    assert tree.add(Guess(2, 0, 0, ())) == 0
    assert tree.passed_at == 2


def test_a_pass_behind_open_guesses_holds_until_the_next_commit_only() -> None:
    committed = [1, 2]
    tree = tree_over(committed)
    tree.add(chain(2, 1, 5, 6, 7))
    tree.add(Guess(5, 0, 3, ()))
    assert tree.passed_at == len(committed)
    commit(tree, committed, 5, 9)
    assert tree.passed_at < len(committed), "the drafter may guess again"


@pytest.mark.parametrize(
    ("guess", "field_name"),
    [
        (chain(3, 1, 7), "guess.position"),
        (chain(9, 1, 7), "guess.position"),
        (chain(2, 1, 7, parent=5), "guess.parent"),
        (chain(2, 0, 7), "guess.first_id"),
        (chain(4, 4, 7, parent=1), "guess.position"),
        (chain(3, 4, 7, parent=2), "guess.position"),
        (chain(3, 1, 7, parent=1), "guess.parent"),
        (chain(2, 9, 7, parent=1, source=1), "guess.parent"),
    ],
)
def test_what_no_honest_drafter_sends_is_refused(guess: Guess, field_name: str) -> None:
    tree = tree_over([1, 2])
    tree.add(chain(2, 1, 5, 6))
    with pytest.raises(InvalidRequest) as refused:
        tree.add(guess)
    assert refused.value.field == field_name
    assert paths(tree) == {(5,), (5, 6)}


def test_a_refused_guess_leaves_no_trace() -> None:
    """Its ids stay unknown: what hangs from them is refused as well."""
    tree = tree_over([1, 2])
    with pytest.raises(InvalidRequest):
        tree.add(chain(9, 1, 7))
    with pytest.raises(InvalidRequest):
        tree.add(chain(3, 2, 8, parent=1))


def test_nodes_have_a_budget() -> None:
    tree = tree_over([1], max_nodes=5)
    tree.add(chain(1, 1, 7, 8, 9))
    assert tree.add(chain(1, 4, 2, 3, 4, 5)) == 2
    assert tree.add(chain(1, 8, 6)) == 0
    assert tree.add(chain(1, 9, 7, 8)) == 0, "what is there already needs no room"
    assert tree._size == 5


def test_pruning_gives_the_budget_back() -> None:
    committed = [1]
    tree = tree_over(committed, max_nodes=3)
    tree.add(chain(1, 1, 7, 8, 9))
    commit(tree, committed, 7, 5)
    assert tree._size == 0
    assert tree.add(chain(3, 4, 1, 2, 3)) == 3


def test_depth_has_a_budget() -> None:
    committed = [1]
    tree = tree_over(committed, max_ahead=2)
    assert tree.add(chain(1, 1, 7, 8, 9)) == 2
    commit(tree, committed, 7)
    assert tree.add(chain(1, 4, 7, 8, 9)) == 1
    assert paths(tree) == {(8,), (8, 9)}


def points(*tokens: int) -> tuple[Distribution, ...]:
    return tuple(Distribution((token,), (WHOLE,)) for token in tokens)


def test_a_step_of_a_single_tree_checks_the_first_child_whatever_its_token() -> None:
    tree = tree_over([1], single=True)
    tree.add(Guess(1, 1, 0, (9, 8), points(9, 8)))
    assert tree.add(Guess(1, 3, 0, (2, 3), points(2, 3), source=1)) == 2
    assert tree.add(Guess(2, 5, 1, (4,), points(4))) == 1
    assert paths(tree) == {(9,), (9, 8)}


def test_a_single_tree_goes_on_with_what_another_drafter_has_drawn_where_the_first_one_fails() -> None:
    """A drafter sends a guess once: dropped, it and all that follows would be missing for as long as it is right."""
    tree = tree_over(committed := [1], single=True)
    tree.add(Guess(1, 1, 0, (9, 8), points(9, 8)))
    tree.add(Guess(1, 1, 0, (2, 3), points(2, 3), source=1))
    commit(tree, committed, 2)
    assert paths(tree) == {(3,)}
    tree.add(Guess(2, 3, 0, (5,), points(5)))
    tree.add(Guess(3, 3, 2, (4,), points(4), source=1))
    assert paths(tree) == {(3,), (3, 4)}


def test_a_single_tree_lengthens_one_drafters_draw_by_anothers() -> None:
    """A chain may end by any rule that looks at the tokens up to its end: what follows an equal token is a draw of its
    own."""
    tree = tree_over([1], single=True)
    tree.add(Guess(1, 1, 0, (9,), points(9)))
    assert tree.add(Guess(1, 1, 0, (9, 8), points(9, 8), source=1)) == 1
    assert tree.add(Guess(2, 2, 1, (7,), points(7))) == 1
    assert paths(tree) == {(9,), (9, 8)}


def test_the_depth_of_a_single_tree_is_that_of_the_chain_which_a_step_checks() -> None:
    """Else a verifier would not wait for the rest of the first draft where the second one is as long as it waits."""
    tree = tree_over([1], single=True)
    tree.add(Guess(1, 1, 0, (9,), points(9)))
    tree.add(Guess(1, 1, 0, (2, 3, 4), points(2, 3, 4), source=1))
    assert tree.depth == 1


def test_of_drawn_guesses_those_of_the_first_drafter_alone_are_tallied() -> None:
    """What another one drew is checked only where it is equal, so it would seem always right."""
    tree = tree_over([1], single=True)
    tree.add(Guess(1, 1, 0, (9, 8), points(9, 8)))
    tree.add(Guess(1, 1, 0, (9, 8, 7), points(9, 8, 7), source=1))
    block = tree.block(9, 9)
    assert block.tokens == (9, 8, 7)
    assert tallies_of(tree, block, accepted=(1, 2, 3)) == (SourceTally(0, 2, 2),)


def test_nodes_carry_the_distribution_that_they_were_drawn_from() -> None:
    committed = [1]
    tree = tree_over(committed, single=True)
    commit(tree, committed, 9)
    tree.add(Guess(1, 1, 0, (9, 8, 7), points(9, 8, 7)))
    assert [node.draft_prob for node in all_nodes(tree)] == list(points(8, 7))


def test_a_block_takes_the_likeliest_guesses_first() -> None:
    """Drafters push their likeliest first: what follows it is worth more than what stands beside it."""
    tree = tree_over([1])
    tree.add(chain(1, 1, 7, 8, 9))
    tree.add(chain(1, 4, 5, 6))
    assert tree.block(3, 9).tokens == (7, 8, 9)
    assert tree.block(4, 9).tokens == (7, 8, 9, 5)
    assert sorted(tree.block(9, 1).tokens) == [5, 7]
    assert tree.block(0, 9) == tree.block(9, 0) == replace(NO_GUESS, position=1)


def test_what_second_guesses_are_worth_is_learnt() -> None:
    tree = tree_over([1])
    tree.add(chain(1, 1, 7, 8))
    tree.add(chain(1, 4, 5, 6))
    assert tree.block(2, 9).tokens == (7, 8)
    committed = [1]
    tree = GuessTree(committed, single=False, max_nodes=EVERYTHING, max_ahead=EVERYTHING)
    for at in range(1, 60):  # the second of two always holds
        tree.add(chain(at, 2 * at - 1, 7))
        tree.add(chain(at, 2 * at, 5))
        committed.append(5)
        tree.commit((5,))
    tree.add(chain(60, 119, 7, 8))
    tree.add(chain(60, 121, 5, 6))
    assert tree.block(1, 9).tokens == (5,)


def test_a_block_that_is_a_chain_follows_the_likeliest_child() -> None:
    tree = tree_over([1])
    tree.add(chain(1, 1, 5, 6))
    tree.add(chain(1, 3, 8))  # a sibling of the first
    tree.add(chain(2, 4, 9, parent=1))  # and one below it
    whole, straight = tree.block(10, 10), tree.block(10, 10, chain=True)
    assert whole.parents
    assert not straight.parents
    assert straight.tokens == (5, 6)
    assert tree.block(1, 10, chain=True).tokens == (5,)


def test_depth_is_that_of_the_longest_chain() -> None:
    tree = tree_over([1])
    assert tree.depth == 0
    tree.add(chain(1, 1, 7))
    tree.add(chain(1, 2, 5, 6))
    assert tree.depth == 2


def test_drafters_are_tallied_each_on_its_own() -> None:
    """What two guessed alike counts for both; the length is that of a drafter's longest path, whatever held of it."""
    tree = tree_over([1])
    tree.add(chain(1, 1, 7, 8, 9, source=3))
    tree.add(chain(1, 1, 7, 5, source=4))
    tree.add(chain(2, 4, 5, 6, parent=1, source=3))
    tree.add(chain(1, 1, 2, source=9))
    block = tree.block(EVERYTHING, EVERYTHING)
    row = {tuple(block.paths[row]): row for row in range(1, len(block.tokens) + 1)}
    path = [row[7,], row[7, 5], row[7, 5, 6]]
    assert tallies_of(tree, block, path) == (SourceTally(3, 3, 3), SourceTally(4, 2, 2), SourceTally(9, 1, 0))
    assert tallies_of(tree, block, path[:1]) == (SourceTally(3, 3, 1), SourceTally(4, 2, 1), SourceTally(9, 1, 0))
    assert tallies_of(tree, tree.block(1, EVERYTHING), ()) == (SourceTally(3, 1, 0), SourceTally(4, 1, 0))
    assert tallies_of(tree, NO_GUESS, ()) == ()


def test_repeating_a_guess_for_ever_takes_no_room() -> None:
    """A hostile drafter may send the same under new ids again and again."""
    tree = tree_over([1], max_nodes=10)
    for first_id in range(1, 20_001, 2):
        tree.add(chain(1, first_id, 7, 8))
    assert tree._size == 2
    kept = sum(len(node.keys) for node in all_nodes(tree))
    assert kept <= 1000, f"{kept} ids are kept for 2 nodes"


# --- against a naive model -------------------------------------------------------------------------------------------

TOKENS = st.integers(0, 2)


@dataclass
class Naive:
    """Stores every guess as whole text from the first token, and thinks again each time."""

    committed: list[int]
    max_nodes: int
    max_ahead: int
    single: bool
    texts: dict[tuple[int, ...], set[tuple[int, int]]] = field(default_factory=dict)  # open nodes and who guessed them
    by_key: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # whole text up to each taken node

    def base_of(self, guess: Guess) -> tuple[int, ...] | None:
        """The text that a guess continues; None when that did not come true."""
        if guess.parent == 0:
            return tuple(self.committed[: guess.position])
        text = self.by_key.get((guess.source, guess.parent))
        return text if text is not None and self.fits(text) else None

    def fits(self, text: tuple[int, ...]) -> bool:
        """Committed already, or stored and still open."""
        return text == tuple(self.committed[: len(text)]) or text in self.texts

    def add(self, guess: Guess) -> None:
        text = self.base_of(guess)
        if text is None:
            return
        for i, token in enumerate(guess.tokens):
            text = (*text, token)
            key = (guess.source, guess.first_id + i)
            if len(text) <= len(self.committed):
                if text != tuple(self.committed[: len(text)]):
                    return
            else:
                if len(text) > len(self.committed) + self.max_ahead:
                    return
                if text not in self.texts:
                    if len(self.texts) >= self.max_nodes:
                        return
                    self.texts[text] = set()
                self.texts[text].add(key)
            self.by_key[key] = text

    def commit(self, tokens: tuple[int, ...]) -> None:
        self.committed.extend(tokens)
        now = tuple(self.committed)
        self.texts = {t: keys for t, keys in self.texts.items() if len(t) > len(now) and t[: len(now)] == now}

    def paths(self) -> set[tuple[int, ...]]:
        return {text[len(self.committed) :] for text in self.texts}

    def checked(self) -> set[tuple[int, ...]]:
        """What a step checks: all, or what came first after each token of one chain."""
        if not self.single:
            return self.paths()
        chain: set[tuple[int, ...]] = set()
        text = tuple(self.committed)
        while (first := next((longer for longer in self.texts if longer[:-1] == text), None)) is not None:
            chain.add(first[len(self.committed) :])
            text = first
        return chain


class TreeMachine(RuleBasedStateMachine):
    """Guesses in any order, of any age, from several drafters, between commits."""

    single = False

    def __init__(self) -> None:
        super().__init__()
        self.committed = [0, 0]
        self.tree = tree_over(self.committed, single=self.single, max_nodes=7, max_ahead=4)
        self.naive = Naive([0, 0], 7, 4, self.single)
        self.next_id = {0: 1, 1: 1}
        self.sent: list[Guess] = []

    def _add(self, guess: Guess) -> None:
        before = self.tree._size
        added = self.tree.add(guess)
        self.naive.add(guess)
        self.sent.append(guess)
        self.next_id[guess.source] = max(self.next_id[guess.source], guess.first_id + len(guess.tokens))
        assert self.tree._size == before + added

    def _new(self, position: int, parent: int, tokens: list[int], source: int) -> Guess:
        probs = points(*tokens) if self.single else ()
        return Guess(position, self.next_id[source], parent, tuple(tokens), probs, source=source)

    @rule(age=st.integers(0, 3), tokens=st.lists(TOKENS, min_size=1, max_size=5), source=st.integers(0, 1))
    def guess_from_the_committed_prefix(self, age: int, tokens: list[int], source: int) -> None:
        self._add(self._new(max(0, len(self.committed) - age), 0, tokens, source))

    @rule(age=st.integers(1, 3), more=st.lists(TOKENS, max_size=3), source=st.integers(0, 1))
    def guess_late_but_right(self, age: int, more: list[int], source: int) -> None:
        position = max(0, len(self.committed) - age)
        self._add(self._new(position, 0, self.committed[position:] + more, source))

    @precondition(lambda self: len(self.committed) > 4)
    @rule(wrong=st.integers(1, 3), more=st.lists(TOKENS, min_size=1, max_size=2), source=st.integers(0, 1))
    def guess_late_and_wrong_somewhere(self, wrong: int, more: list[int], source: int) -> None:
        position = len(self.committed) - 3
        tokens = self.committed[position:]
        tokens[wrong - 1] = (tokens[wrong - 1] + 1) % 3
        self._add(self._new(position, 0, tokens + more, source))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), tokens=st.lists(TOKENS, min_size=1, max_size=3))
    def guess_from_an_earlier_guess(self, data: st.DataObject, tokens: list[int]) -> None:
        """Whatever became of it."""
        earlier = data.draw(st.sampled_from(self.sent))
        i = data.draw(st.integers(0, len(earlier.tokens) - 1))
        self._add(self._new(earlier.position + i + 1, earlier.first_id + i, tokens, earlier.source))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def the_network_delivers_a_guess_again(self, data: st.DataObject) -> None:
        """A duplicate says nothing new."""
        again = data.draw(st.sampled_from(self.sent))
        self._add(again)

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=3))
    def commit_anything(self, tokens: list[int]) -> None:
        commit(self.tree, self.committed, *tokens)
        self.naive.commit(tuple(tokens))

    @precondition(lambda self: self.tree._size)
    @rule(data=st.data(), bonus=TOKENS)
    def commit_what_was_guessed(self, data: st.DataObject, bonus: int) -> None:
        path = data.draw(st.sampled_from(sorted(self.naive.paths())))
        commit(self.tree, self.committed, *path, bonus)
        self.naive.commit((*path, bonus))

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), unknown=st.integers(0, 3), source=st.integers(0, 1))
    def an_unknown_parent_is_refused(self, data: st.DataObject, unknown: int, source: int) -> None:
        parent = self.next_id[source] + unknown
        guess = Guess(len(self.committed), parent + 1, parent, (0,), points(0) if self.single else (), source=source)
        with pytest.raises(InvalidRequest):
            self.tree.add(guess)

    @rule(ahead=st.integers(1, 5), source=st.integers(0, 1))
    def a_position_without_a_parent_is_refused(self, ahead: int, source: int) -> None:
        with pytest.raises(InvalidRequest):
            self.tree.add(self._new(len(self.committed) + ahead, 0, [0], source))

    @invariant()
    def the_tree_holds_what_the_model_holds(self) -> None:
        assert paths(self.tree) == self.naive.checked()
        assert self.tree._size == len(self.naive.texts) <= 7
        assert self.tree.depth == max(map(len, self.naive.checked()), default=0)
        assert max(map(len, self.naive.paths()), default=0) <= 4

    @invariant()
    def blocks_are_in_order_and_positions_right(self) -> None:
        for rows, depth in ((EVERYTHING, EVERYTHING), (3, EVERYTHING), (EVERYTHING, 2)):
            block = self.tree.block(rows, depth)
            nodes = self.tree.nodes(block)
            assert len(block.tokens) == len(nodes) <= rows
            assert all(parent < node for node, parent in enumerate(block.shape.parents)), "parents first"
            assert block.shape.depth <= depth
            places = list(zip(block.shape.parents, block.tokens, strict=True))
            assert len(set(places)) == len(places), "siblings differ"
            for row, node in enumerate(nodes, start=1):
                assert node.token == block.tokens[row - 1]
                assert node.position == len(self.committed) + len(block.paths[row]) - 1
        if self.single:
            assert len(set(block.shape.parents)) == len(block.tokens)

    @invariant()
    def nothing_pruned_is_remembered(self) -> None:
        alive = [self.tree._root]
        for node in alive:
            alive += node.children.values()
        assert {id(node) for node in self.tree._nodes.values()} <= {id(node) for node in alive}


class SingleTreeMachine(TreeMachine):
    single = True


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=250, stateful_step_count=15, deadline=None)
TestSingleTree = SingleTreeMachine.TestCase
TestSingleTree.settings = settings(max_examples=250, stateful_step_count=15, deadline=None)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(
            Guess,
            position=st.integers(0, 12),
            first_id=st.integers(0, 20),
            parent=st.integers(0, 20),
            tokens=st.lists(TOKENS, max_size=4).map(tuple),
            source=st.integers(0, 1),
        ),
        max_size=25,
    )
)
def test_nonsense_is_refused_or_ignored_and_never_breaks_the_tree(guesses: list[Guess]) -> None:
    """Ids used twice, parents of another drafter, positions that lie."""
    committed = [0, 1, 2]
    tree = tree_over(committed, max_nodes=9, max_ahead=5)
    for i, guess in enumerate(guesses):
        with contextlib.suppress(InvalidRequest):
            tree.add(guess)
        if i % 4 == 3:
            commit(tree, committed, i % 3)
        block = tree.block(EVERYTHING, EVERYTHING)
        assert len(block.tokens) == tree._size <= 9
        for row, node in enumerate(all_nodes(tree), start=1):
            assert node.position == len(committed) + len(block.paths[row]) - 1


def test_names_of_committed_guesses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter may name a token anew for ever after it was committed."""
    monkeypatch.setattr(tree_module, "MAX_HELD", 5)
    tree = tree_over([0, 7])
    for first_id in range(1, 100):
        tree.add(chain(1, first_id, 7))
    assert len(tree._committed_guesses) == 5


def test_drafters_of_a_session_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that names another one with each guess takes memory otherwise."""
    monkeypatch.setattr(tree_module, "MAX_HELD", 5)
    tree = tree_over([0, 7])
    for source in range(1, 6):
        tree.add(chain(1, 1, 7, source=source))
    with pytest.raises(InvalidRequest, match=r"guess\.source is 6"):
        tree.add(chain(1, 1, 7, source=6))
    tree.add(chain(1, 2, 7, source=5))
