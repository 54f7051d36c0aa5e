"""Targets and drafters of one `outrider up`, from its flags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.launch.services import check_services
from outrider.launch.stack import LaunchPlan, coordinators, workers
from outrider.launch.targets import TargetPlan, plan_targets, planned
from outrider.protocol.errors import StartupError
from outrider.train.artifacts.card import is_trained, locate

DEFAULT_DRAFTER = (("suffix", ""),)


def test_one_target_is_as_before() -> None:
    assert plan_targets(["org/big"], ["model:org/small"], 2, "auto") == (
        TargetPlan("org/big", "", (("model", "org/small"),) * 2),
    )
    assert plan_targets(["org/big"], [], 1, "auto") == (TargetPlan("org/big", "", DEFAULT_DRAFTER),)
    (default,) = plan_targets([], [], 0, "auto")
    assert default == TargetPlan("default")
    plan = LaunchPlan(**planned(None, ["ngram"], 1, "auto"))
    assert plan == LaunchPlan()
    assert [spec.settings.served_model_name for spec in workers(plan, [])[:1]] == [""]


def test_a_variable_has_a_target_in_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "a=org/big\n\n  b=org/code \n"
    monkeypatch.setenv("OUTRIDER_TARGET", variable)
    plan = planned(variable.split(), None, 1, "auto")
    assert [plan["name"], *(target.name for target in plan["others"])] == ["a", "b"]


def test_two_targets_and_three_drafters(tmp_path: Path) -> None:
    given = ["a=org/big", str(tmp_path)], ["suffix", "a=ngram"]
    plan = replace(LaunchPlan(**planned(*given, 1, "auto")), verifiers=2)
    made = workers(plan, ["x:1"])
    assert [(s.name, s.settings.target, s.settings.served_model_name) for s in made if s.kind == "verifier"] == [
        ("verifier-1", "org/big", "a"),
        ("verifier-2", "org/big", "a"),
        ("verifier-3", str(tmp_path), tmp_path.name),
        ("verifier-4", str(tmp_path), tmp_path.name),
    ]
    assert [(s.name, s.settings.target, s.settings.kind) for s in made if s.kind == "drafter"] == [
        ("drafter-1", "org/big", "suffix"),
        ("drafter-2", "org/big", "ngram"),
        ("drafter-3", str(tmp_path), "suffix"),
    ]
    assert [spec.settings.default_model for spec in coordinators(plan, "")] == ["a"]


def test_names_are_made_of_models(tmp_path: Path) -> None:
    file = tmp_path / "small.Q4.gguf"
    file.touch()
    plans = plan_targets(["default", str(file), "org/big"], [], 1, "auto")
    assert [plan.name for plan in plans] == ["SmolLM2-135M-Instruct", "small.Q4", "org/big"]


def test_a_path_may_contain_an_equals_sign(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    for text in (str(folder), "./x=y/z"):
        assert plan_targets([text], [], 0, "auto") == (TargetPlan(text),)
    (only,) = plan_targets(["org/big"], [f"model:{folder}"], 1, "auto")
    assert only.drafters == (("model", str(folder)),)


def test_a_target_without_a_drafter_of_its_own_has_the_best_one() -> None:
    plans = plan_targets(["a=x", "b=y"], ["a=ngram"], 1, "auto")
    assert [plan.drafters for plan in plans] == [(("ngram", ""),), DEFAULT_DRAFTER]


def test_the_name_of_the_only_target_may_be_given_too() -> None:
    for target, named in (("a", "a"), ("org/big", "org/big"), ("default", "SmolLM2-135M-Instruct"), ("x=a", "x")):
        (plan,) = plan_targets([target], [f"{named}=ngram"], 1, "auto")
        assert plan == TargetPlan("a" if named == "x" else target, "x" * (named == "x"), (("ngram", ""),))
    with pytest.raises(StartupError, match="drafter is b=ngram"):
        plan_targets(["a"], ["b=ngram"], 1, "auto")


def test_the_home_of_no_user_is_a_path_that_does_not_exist() -> None:
    home = "~no-user-has-this-name/x"
    for target, drafter in ((home, "suffix"), ("a=x", f"model:{home}"), ("a=x", f"a={home}"), (f"a={home}", "auto")):
        with pytest.raises(StartupError, match=home):
            check_services(workers(LaunchPlan(**planned([target, "b=y"], [drafter], 1, "auto")), []))
    assert not is_trained(home)
    assert locate(home, "eagle") == Path(home)


def test_two_targets_of_one_name_or_model_are_refused() -> None:
    with pytest.raises(StartupError, match="two targets have the name a; give each its own: --target NAME=MODEL"):
        plan_targets(["a=x", "a=y"], [], 1, "auto")
    with pytest.raises(StartupError, match="two targets have the model x"):
        plan_targets(["a=x", "b=x"], [], 1, "auto")


def test_one_folder_is_one_target_by_whatever_name(tmp_path: Path) -> None:
    """Their weights are equal, which is noticed only when both are loaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    for other in ("link", "model/../model"):
        with pytest.raises(StartupError, match=f"two targets have the model {tmp_path}/model"):
            plan_targets([f"a={tmp_path}/model", f"b={tmp_path}/{other}"], [], 1, "auto")


def test_the_mock_engine_has_its_own_drafter() -> None:
    assert plan_targets([], [], 1, "mock")[0].drafters == (("mock", ""),)
    with pytest.raises(StartupError, match="mock"):
        plan_targets([], ["suffix"], 1, "mock")
