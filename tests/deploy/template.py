"""The template as tests read it: YAML with CloudFormation's short forms, and its policies."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.deploy.recorder import Right

TEMPLATE = Path(__file__).parents[2] / "deploy" / "aws" / "tidelog.yaml"


class _Loader(yaml.SafeLoader):
    """Knows `!Ref` and its like as plain values under their names."""


def _short(loader: _Loader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        return {suffix: loader.construct_scalar(node)}
    assert isinstance(node, yaml.SequenceNode)
    return {suffix: loader.construct_sequence(node, deep=True)}


_Loader.add_multi_constructor("!", _short)


def read_template() -> dict[str, Any]:
    """The whole of it."""
    loaded: dict[str, Any] = yaml.load(TEMPLATE.read_text(), _Loader)
    return loaded


class Allowed(NamedTuple):
    """One action of one statement."""

    action: str
    resources: tuple[str, ...]  # patterns, with names of the test in them
    leading: tuple[str, ...]  # patterns of hash keys; none: any


def allowed_by(policy: str, names: dict[str, str]) -> list[Allowed]:
    """What a policy, or a role's own one, allows; ``names`` is what a test calls resources."""
    properties = read_template()["Resources"][policy]["Properties"]
    inner = properties["Policies"][0] if "Policies" in properties else properties
    document = inner["PolicyDocument"]
    found = []
    for statement in document["Statement"]:
        assert statement["Effect"] == "Allow"
        actions = statement["Action"]
        resources = statement["Resource"]
        listed = resources if isinstance(resources, list) else [resources]
        condition = statement.get("Condition", {}).get("ForAllValues:StringLike", {})
        leading = tuple(condition.get("dynamodb:LeadingKeys", ()))
        named = tuple(_named(each, names) for each in listed)
        several = actions if isinstance(actions, list) else [actions]
        found.extend(Allowed(action, named, leading) for action in several)
    return found


def _named(resource: dict[str, str], names: dict[str, str]) -> str:
    [(kind, text)] = resource.items()
    if kind != "Sub":
        return names[text.removesuffix(".Arn")]
    for name, value in names.items():
        text = text.replace(f"${{{name}.Arn}}", value).replace(f"${{{name}}}", value)
    return text


def allows(allowed: Allowed, right: Right) -> bool:
    """Whether this statement allows that request."""
    return (
        allowed.action == right.action
        and any(fnmatch.fnmatchcase(right.resource, pattern) for pattern in allowed.resources)
        and (
            not right.leading
            or not allowed.leading
            or any(fnmatch.fnmatchcase(right.leading, pattern) for pattern in allowed.leading)
        )
    )
