"""The kernels: the same bits whatever shares a step, for every format of weights and every odd shape."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.base.config import home
from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.engine.model_spec import build_spec
from outrider.engine.native import NativeEngine, NoCompiler, build
from outrider.engine.native import engine as native_engine
from outrider.engine.transformers.engine import TransformersEngine
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.testing.toy_models import make_model
from tests.unit.outrider.engine.native.tiles import tiles

TILES = "bfloat16 in tiles"
VOCAB = 203  # no multiple of any panel
TOKENS = torch.randint(VOCAB, (400,), generator=torch.Generator().manual_seed(3)).tolist()

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "initializer_range": 0.2,
}


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).eval()


def seeded(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).eval()


def engine(model: Any, weights: str = "float32", threads: int = 1, cache: str = "float32") -> NativeEngine:
    info = ModelInfo("m", "f", vocab_size=VOCAB)
    tiled = "tiles" in cache
    with tiles() if tiled else nullcontext():
        made = NativeEngine(build_spec(model), info, kv_tokens=4096, weights=weights, threads=threads, exact=not tiled)
    made.use_cache(getattr(torch, cache.split()[0]))
    assert made._model.tiled_cache == tiled
    return made


SHAPES = {
    "grouped heads": llama(),
    "one key head for many": llama(num_attention_heads=18, num_key_value_heads=1),
    "a head as wide as several panels": llama(head_dim=80),
    "biases and learnt positions": GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=40, n_layer=2, n_head=4, n_positions=512)
    ).eval(),
}


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(
    ("weights", "cache"),
    [
        *[("float32", "float32"), ("bfloat16", "float32"), ("int8", "float32"), ("float32", "bfloat16")],
        *[("float32", TILES), ("bfloat16", TILES)],  # attention in tiles, and products as well
    ],
)
def test_a_sessions_bits_do_not_depend_on_neighbours_or_on_how_many_rows_go_at_once(
    model: Any, weights: str, cache: str
) -> None:
    runs = engine(model, weights, cache=cache)
    whole = runs.extend([SessionTokens("whole", TOKENS)]).logits[0].clone()
    for size in (1, 2, 3, 5, 9, 12, 13, 17, 25, 49, 60, 97):
        runs.free("pieces")
        runs.blocks.pool.evict_all()
        at = 0
        while at < 200:
            neighbours = [SessionTokens(f"n{size}-{at}-{i}", TOKENS[i : i + 3 * i + 1]) for i in range(size % 4)]
            piece = SessionTokens("pieces", TOKENS[at : at + size])
            found = runs.extend([*neighbours, piece]).logits[-1]
            assert torch.equal(found, whole[at : at + size])
            at += len(piece.tokens)
            for rows in neighbours:
                runs.free(rows.session)


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("cache", ["float32", "bfloat16", TILES])
def test_a_guess_has_the_bits_of_the_token_that_it_becomes(model: Any, cache: str) -> None:
    """Along any path of a tree, and after the path was kept and its rows moved together."""
    runs = engine(model, cache=cache)
    whole = runs.extend([SessionTokens("whole", TOKENS[:70])]).logits[0].clone()
    for base in (1, 30, 31, 33, 63):  # paths within a page, and across one
        session = f"tree {base}"
        runs.extend([SessionTokens(session, TOKENS[:base])])
        right = TOKENS[base : base + 3]
        tree = [7, right[0], 9, right[1], 11, right[2], 13]
        parents = (-1, -1, 0, 1, 1, 3, 5)
        found = runs.extend([SessionTokens(session, tree, parents)]).logits[0]
        for row, depth in ((1, 0), (3, 1), (5, 2)):
            assert torch.equal(found[row], whole[base + depth])
        runs.compact(session, base, [1, 3, 5])
        assert torch.equal(
            runs.extend([SessionTokens(session, TOKENS[base + 3 : base + 6])]).logits[0], whole[base + 3 : base + 6]
        )


@pytest.mark.parametrize("cache", ["float32", "bfloat16", TILES])
def test_all_siblings_of_a_tree_see_as_far_back_as_the_next_token(cache: str) -> None:
    """Those of a later task too: a window begins before the tree, not before their place in it."""
    runs = engine(KINDS["window"](), cache=cache)
    whole = runs.extend([SessionTokens("whole", TOKENS[:80])]).logits[0].clone()
    for base in range(58, 74):  # the window begins in the first page or in the second
        runs.extend([SessionTokens("tree", TOKENS[runs.length("tree") : base])])
        found = runs.extend([SessionTokens("tree", [TOKENS[base]] * 16, (-1,) * 16)]).logits[0]
        assert torch.equal(found, whole[base].expand_as(found)), base
        runs.truncate("tree", base)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations_far_out_are_what_torch_makes_of_them(activation: str) -> None:
    """Models have units that answer in the hundreds: an exponential that overflows must not show."""
    model = llama(hidden_act=activation, num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.mul_(300)
        reached = torch.nn.functional.linear(
            model.model.layers[0].post_attention_layernorm(model.model.embed_tokens(torch.tensor(TOKENS[:40]))),
            model.model.layers[0].mlp.gate_proj.weight,
        )
        assert reached.max() > 300
        assert reached.min() < -300
        truth = model(torch.tensor([TOKENS[:40]])).logits[0]
    found = engine(model).extend([SessionTokens("s", TOKENS[:40])]).logits[0]
    assert torch.allclose(found, truth, rtol=1e-3, atol=1e-3 * float(truth.abs().max()))


LEVELS = [level for level, needed in build.levels().items() if torch.cpu.get_capabilities().get(needed)]
KINDS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": lambda: SHAPES["biases and learnt positions"],
    "relu": lambda: llama(hidden_act="relu", num_attention_heads=18, num_key_value_heads=1),
    "gelu": lambda: llama(hidden_act="gelu", attention_bias=True, mlp_bias=True),
    "window": lambda: seeded(MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=40)),
    "norms of heads": lambda: seeded(Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
    "caps": lambda: seeded(Gemma2ForCausalLM, Gemma2Config(**SHAPE, sliding_window=40, query_pre_attn_scalar=20)),
    "parallel": lambda: seeded(
        GPTNeoXForCausalLM,
        GPTNeoXConfig(
            vocab_size=VOCAB, hidden_size=72, num_hidden_layers=2, num_attention_heads=6, intermediate_size=99
        ),
    ),
}


@pytest.mark.skipif(len(LEVELS) < 2, reason="this processor runs one kind of kernels")
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_vectors_of_every_width_make_the_same_bits(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So one verifier may go on where another of an unlike processor died."""
    model = make()
    found: dict[str, list[torch.Tensor]] = {}
    for level in LEVELS:
        built = build.load(build.compile_for(level, home() / "kernels"))
        assert built.outrider_arithmetic() > 0
        monkeypatch.setattr("outrider.engine.native.engine.library", lambda built=built: built)
        for weights, cache in (("float32",) * 2, ("bfloat16",) * 2, ("int8", "float32")):
            runs = engine(model, weights, cache=cache)
            whole = runs.extend([SessionTokens("s", TOKENS[:150])])
            tree = runs.extend([SessionTokens("s", [1, 2, 3, 4, 5], (-1, -1, 0, 1, 1), hidden_from=0)])
            found.setdefault(weights, []).append(torch.cat([whole.logits[0], tree.logits[0]]).clone())
    assert len({build.load(build.compile_for(level, home() / "kernels")).outrider_lanes() for level in LEVELS}) > 1
    for narrow, wide in found.values():
        assert torch.equal(narrow, wide)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_attention_in_tiles_is_that_of_vectors_and_keeps_the_bits_of_every_cut(make: Callable[[], Any]) -> None:
    model = make()
    truth = engine(model, cache="bfloat16").extend([SessionTokens("s", TOKENS[:150])]).logits[0].clone()
    runs = engine(model, cache=TILES)
    whole = runs.extend([SessionTokens("whole", TOKENS[:150])]).logits[0].clone()
    assert 0 < (whole - truth).norm() < 2e-3 * truth.norm()
    right = TOKENS[90:93]
    for size in (1, 9, 33):
        for at in range(0, 90, size):
            found = runs.extend([SessionTokens("cut", TOKENS[at : min(90, at + size)])]).logits[0]
            assert torch.equal(found, whole[at : at + len(found)])
        tree = [7, right[0], 9, right[1], 11, right[2], 13]
        found = runs.extend([SessionTokens("cut", tree, (-1, -1, 0, 1, 1, 3, 5))]).logits[0]
        assert torch.equal(found[[1, 3, 5]], whole[90:93])
        runs.free("cut")
        runs.blocks.pool.evict_all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("make", [llama, KINDS["window"], KINDS["caps"]], ids=["all", "window", "caps"])
@pytest.mark.parametrize("cache", ["float32", "bfloat16", TILES])
def test_a_wrong_guess_that_is_no_number_changes_nobody_elses_bits(
    make: Callable[[], Any], bad: float, cache: str
) -> None:
    """Siblings, tokens before it, and whoever gets its page later. Who continues it sees it."""
    model = make()
    runs = engine(model, cache=cache)
    whole = runs.extend([SessionTokens("whole", TOKENS[:70])]).logits[0].clone()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = bad
    assert 7 not in TOKENS[:70]
    for base in (1, 30, 31, 63):
        runs.extend([SessionTokens("tree", TOKENS[:base])])
        right = TOKENS[base : base + 2]
        tree, parents = [7, right[0], 7, right[1], 5], (-1, -1, 1, 1, 0)
        found = runs.extend([SessionTokens("tree", tree, parents)]).logits[0]
        assert torch.equal(found[[1, 3]], whole[base : base + 2])
        assert torch.isnan(found[[0, 2, 4]]).all()
        runs.compact("tree", base, [1, 3])
        chain = runs.extend([SessionTokens("tree", [TOKENS[base + 2], 7, 7, 3])]).logits[0]
        assert torch.equal(chain[0], whole[base + 2])
        runs.free("tree")
        runs.blocks.pool.evict_all()
    runs.free("whole")
    runs.blocks.pool.evict_all()
    assert torch.equal(runs.extend([SessionTokens("later", TOKENS[:70])]).logits[0], whole)


@pytest.mark.parametrize(
    "make", [llama, KINDS["caps"], KINDS["parallel"]], ids=["llama", "norms of outputs", "parallel"]
)
@pytest.mark.parametrize("cache", ["float32", "bfloat16", TILES])
def test_threads_do_not_change_the_bits(make: Callable[[], Any], cache: str) -> None:
    """Of many rows, which they share out, and of few, which each prepares for itself."""
    model = make()
    one, three = engine(model, cache=cache), engine(model, threads=3, cache=cache)
    for rows in (400, 2, 3, 4, 5, 60):
        tokens = SessionTokens(f"of {rows}", TOKENS[:rows])
        assert torch.equal(one.extend([tokens]).logits[0], three.extend([tokens]).logits[0]), rows


def test_a_cache_of_bfloat16_holds_the_same_keys_and_values_rounded() -> None:
    """In the first layer; the others read what attention made of it."""
    model = llama()
    whole, rounded = engine(model), engine(model, cache="bfloat16")
    logits = [runs.extend([SessionTokens("s", TOKENS[:50])]).logits[0] for runs in (whole, rounded)]
    assert torch.equal(rounded._keys[0], whole._keys[0].bfloat16())
    assert torch.equal(rounded._values[0], whole._values[0].bfloat16())
    assert 0 < (logits[0] - logits[1]).norm() < 0.02 * logits[0].norm()
    assert rounded.arithmetic != whole.arithmetic


def test_a_prefix_from_the_cache_has_the_bits_of_one_made_anew() -> None:
    runs = engine(llama())
    whole = runs.extend([SessionTokens("first", TOKENS[:150])]).logits[0].clone()
    runs.free("first")
    found = runs.match_prefix("second", TOKENS[:150])
    assert found == 128
    assert torch.equal(runs.extend([SessionTokens("second", TOKENS[found:150])]).logits[0], whole[found:])


def test_int8_is_the_model_whose_weights_were_rounded_so() -> None:
    model = llama()
    found = engine(model, "int8").extend([SessionTokens("s", TOKENS[:50])]).logits[0].clone()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                scale = weight.abs().amax(dim=1, keepdim=True) / 127
                weight.copy_((weight / scale).round() * scale)
        truth = model(torch.tensor([TOKENS[:50]])).logits[0]
    assert torch.allclose(found, truth, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("longest", [0, 1, 2])
def test_rotations_reach_the_longest_session_of_a_first_step(longest: int) -> None:
    """Wherever it is in the step: the tables of cosines grow with it."""
    model = llama()
    texts = [TOKENS[:300] if place == longest else TOKENS[:2] for place in range(3)]
    found = engine(model).extend([SessionTokens(str(place), text) for place, text in enumerate(texts)]).logits
    for logits, text in zip(found, texts, strict=True):
        assert torch.equal(logits, engine(model).extend([SessionTokens("alone", text)]).logits[0])


def test_after_a_step_that_had_no_memory_for_its_rotations_the_next_one_makes_them() -> None:
    """Its sessions go to another verifier, and this one goes on: it must not read behind the end of the old tables."""
    model = llama()
    truth = engine(model).extend([SessionTokens("s", TOKENS[:300])]).logits[0].clone()
    runs = engine(model)
    runs.extend([SessionTokens("a", TOKENS[:2])])
    spec = runs._spec

    def fail(positions: torch.Tensor) -> Any:
        raise RuntimeError(f"not enough memory for {len(positions)} positions")

    runs._spec = replace(spec, rotations=(fail,))
    with pytest.raises(RuntimeError, match="599 positions"):
        runs.extend([SessionTokens("s", TOKENS[:300])])
    runs._spec = spec
    assert torch.equal(runs.extend([SessionTokens("s", TOKENS[:300])]).logits[0], truth)


@pytest.mark.parametrize("inner", [512, 513, 1100])
def test_a_wide_feed_forward_part_is_activated_in_shares(inner: int) -> None:
    """Threads take 512 values at once; all other models here have fewer."""
    model = llama(intermediate_size=inner, num_hidden_layers=1)
    with torch.no_grad():
        truth = model(torch.tensor([TOKENS[:9]])).logits[0]
    found = engine(model, threads=2).extend([SessionTokens("s", TOKENS[:9])]).logits[0]
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-3)


def test_a_step_larger_than_any_before_finds_room() -> None:
    runs = engine(llama())
    small = runs.extend([SessionTokens("a", TOKENS[:2])]).logits[0].clone()
    large = runs.extend([SessionTokens("b", TOKENS), SessionTokens("c", TOKENS[:2])]).logits
    assert torch.equal(large[1], small)


def test_the_scratch_of_a_chain_has_room_for_its_parts() -> None:
    """A chain lays its scratch memory out again for its first rows and for single ones, prepared by every thread."""
    runs = engine(llama(), threads=64)

    def size(rows: int) -> int:
        step = native_engine._C.Step(rows=rows, threads=64)
        return int(runs._library.outrider_scratch(ctypes.byref(runs._model), ctypes.byref(step)))

    sizes = [size(rows) for rows in range(1, 17)]
    assert sizes == sorted(sizes)


def test_no_compiler_means_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise NoCompiler("there is no C compiler (cc) on this machine")

    folder = str(make_model(tmp_path / "model", seed=1))
    monkeypatch.setattr("outrider.engine.native.engine.library", none)
    said: list[str] = []
    assert isinstance(load_model(folder, progress=said.append).engine, TransformersEngine)
    assert any("no C compiler" in line for line in said)
    with pytest.raises(StartupError, match="no C compiler"):
        load_model(folder, EngineOptions(engine="native"))


def test_kernels_are_compiled_once_and_a_machine_without_compiler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.c").write_text("int one(void) { return 1; }\n")  # compiled in no time
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    made = build.compile_for("native", tmp_path)
    stamp = made.stat().st_mtime_ns
    assert build.compile_for("native", tmp_path).stat().st_mtime_ns == stamp
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert build.compile_for("native", tmp_path) == made
    with pytest.raises(NoCompiler, match="no C compiler"):
        build.compile_for("native", tmp_path / "elsewhere")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(NoCompiler, match="march"):
        build.compile_for("abacus", tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".so"]


def test_what_a_compiler_says_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of a start is a line: of two, `outrider up` would show the first, which names no cause."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\nprintf "x.s: Assembler messages:\\nx.s: Fatal error: No space left\\n" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NoCompiler, match=r"Assembler messages: x\.s: Fatal error: No space left$"):
        build.compile_for("native", tmp_path / "kernels")


def test_a_compiler_that_fails_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight in the blocks of a file asks for the kernels, and a compiler without headers is slow to fail."""
    asked: list[str] = []

    def fail(march: str, _: Path) -> Path:
        asked.append(march)
        raise NoCompiler("math.h: No such file")

    monkeypatch.setattr(build, "compile_for", fail)
    monkeypatch.setattr(build, "_built_ahead", lambda: None)
    build.find_library.cache_clear()
    try:
        for _ in range(3):
            with pytest.raises(NoCompiler, match=r"math\.h"):
                build.library()
    finally:
        build.find_library.cache_clear()
    assert asked == ["native"]


def test_kernels_built_ahead_are_found_by_what_the_processor_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_AHEAD", tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for level in ("x86-64-v3", "x86-64-v4"):
        (tmp_path / f"kernels-{level}-{build._digest(level)}.so").touch()
    for able, level in (({"avx512_bw": True, "avx2": True}, "v4"), ({"avx2": True}, "v3")):
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda able=able: able)
        found = build._built_ahead()
        assert found is not None
        assert level in found.name
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    assert build._built_ahead() is None


def test_threads_wait_briefly_unless_told_otherwise() -> None:
    """Set before torch is loaded, in a process of its own; a user's own choice is left alone."""

    def shown(**more: str) -> str:
        code = "import verifier, os; print(os.environ.get('GOMP_SPINCOUNT'))"
        clean = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        return subprocess.run(
            [sys.executable, "-c", code], env=clean | more, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert shown() == "2000"
    assert shown(GOMP_SPINCOUNT="7") == "7"
    assert shown(OMP_WAIT_POLICY="passive") == "None"


def test_threads_that_sleep_beside_others_miss_nothing() -> None:
    """More of them than cores, beside a busy process: most wait, sleep and are woken some time in each step."""
    model = llama()
    one, many = engine(model), engine(model, threads=2 * (os.cpu_count() or 1) + 1)
    prompt = list(range(1, 41))
    for each in (one, many):
        each.extend([SessionTokens("a", prompt)])
    busy = subprocess.Popen(
        [sys.executable, "-c", "import os\nwhile os.getppid() == int(os.environ['OF']): pass"],
        env=os.environ | {"OF": str(os.getpid())},
    )
    try:
        for step in range(300):
            tokens = [1 + (step * 7 + row) % 90 for row in range(1 + step % 6)]
            asked = SessionTokens("a", tokens, logits_from=0)
            assert torch.equal(one.extend([asked]).logits[0], many.extend([asked]).logits[0]), step
            for each in (one, many):
                each.truncate("a", 40)
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
def test_threads_that_loaded_a_model_are_gone_before_another_runs_it(tmp_path: Path) -> None:
    """Were they counted still, OpenMP would put the others to sleep between any two parts of a step."""
    folder = make_model(tmp_path / "model", seed=1)
    code = f"""
import os, time, torch
from outrider.engine.loading.loader import load_model
from outrider.base.openmp import release_threads
torch.set_num_threads(3)
def count():
    return len(os.listdir("/proc/self/task"))
def count_until(wanted):  # the kernel takes its time to bury a thread
    deadline = time.monotonic() + 10
    while count() != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return count()
time.sleep(0.5)
before = count()
torch.ones(2_000_000).sum()
spread = count_until(before + 2)
release_threads()
print(before, spread, count_until(before), end=" ")
load_model({str(folder)!r})
print(count_until(before))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, spread, rested, loaded = map(int, ran.stdout.split())
    assert spread == before + 2
    assert rested == before
    assert loaded == before


def test_a_kernel_without_large_pages_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("outrider.engine.native.engine.mmap.mmap", Small)
    assert engine(llama()).extend([SessionTokens("s", TOKENS[:9])]).logits[0].isfinite().all()


def test_a_cache_that_there_is_no_memory_for_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def __new__(cls, file: int, size: int, *flags: int) -> Any:
            if size > 1 << 30:
                raise OSError(12, "Cannot allocate memory")
            return super().__new__(cls, file, size, *flags)

    monkeypatch.setattr("outrider.engine.native.engine.mmap.mmap", Small)
    with pytest.raises(StartupError, match="kv_tokens is 4194304, must be fewer: Cannot allocate memory"):
        NativeEngine(build_spec(llama()), ModelInfo("m", "f", vocab_size=VOCAB), kv_tokens=1 << 22)


def test_the_first_layers_of_gemma_3_have_one_rotation() -> None:
    """Five of six look back through a window."""
    kinds = ["sliding_attention"] * 2
    model = seeded(Gemma3ForCausalLM, Gemma3TextConfig(**SHAPE, sliding_window=40, layer_types=kinds))
    truth = model(torch.tensor([TOKENS[:60]])).logits[0]
    found = engine(model).extend([SessionTokens("s", TOKENS[:60])]).logits[0]
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("machine", "wanted"), [("aarch64", ["armv8-a"]), ("riscv64", ["native"])])
def test_images_of_other_processors_have_kernels_that_they_use(
    machine: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "_AHEAD", tmp_path)
    monkeypatch.setattr(build, "compile_for", lambda level, into: made.append(level))
    monkeypatch.setattr(sys, "argv", ["build"])
    build.main()
    assert made == wanted
    for level in made:
        (tmp_path / f"kernels-{level}-{build._digest(level)}.so").touch()
    found = build._built_ahead()
    assert (found is not None) is (machine == "aarch64"), "a processor's own kernels run on its own alone"
