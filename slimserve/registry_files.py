"""Reading the registry: every file under profiles/, checked by itself and against the others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slimserve import receipt_file
from slimserve.consistency import check_consistency, check_environment
from slimserve.errors import Finding, RegistryError, raise_if_any
from slimserve.model import Checkpoint, Model
from slimserve.platform import Platform
from slimserve.policies import BY_ID, broken
from slimserve.profile import Evidence, Profile, Setting
from slimserve.registry import Registry, Source, Sources
from slimserve.shapes import Loc, Problem, dotted, nearest, plain
from slimserve.subject import Subject
from slimserve.validate import validate
from slimserve.weights import bundled
from slimserve.weights.manifest_file import read_manifest
from slimserve.yaml_source import Document, read_document

M = TypeVar("M", Profile, Model, Platform)

# Words that say nothing by themselves: a reason made of these, its key and its value is no reason.
_FILLER = frozenset(
    (
        "a an and are as at be because by default disabled do enabled for from has have in is it its must no not of "
        "off on or our set sets setting should so that the then this to true false turned use used uses using value "
        "values want we which will with"
    ).split()
)
_WORD = re.compile(r"[a-z0-9.]+")
_OBSERVED = re.compile(r"\b(?:was|were|as|slowest|fastest|we|have|has) (?:seen|saw|observed|measured|timed|tried)\b")
MIN_REASON_WORDS = 4
# Below receipts/: what `harness.plan_check` saw of starts. They are of a card, and no profile is measured by them.
STARTS = "starts/"


def load_registry(folder: Path, reserved: frozenset[str] = frozenset()) -> Registry:
    """Read every file under `folder`.

    Args:
        folder: the registry's folder.
        reserved: environment variables that no profile may set.

    Raises:
        RegistryError: with the problems of all files.
    """
    problems: list[Finding] = []
    models = _read_all(Model, folder / "models", problems)
    platforms = _read_all(Platform, folder / "platforms", problems)
    profiles = _read_all(Profile, folder, problems, skip="sources.yaml")
    sources: dict[str, Source] | None = None
    try:
        sources = validate(Sources, read_document(folder / "sources.yaml")).sources
    except RegistryError as error:
        problems += error.findings
    texts = _Texts(folder, sources)
    for document, model in models.values():
        problems += _found(document, _check_manifests(model, folder))
    for document, platform in platforms.values():
        problems += _found(document, texts.check(platform.settings()))
    for document, profile in profiles.values():
        problems += _found(document, check_environment(profile, reserved))
        problems += _found(document, texts.check((*profile.settings(), *_options(profile))))
        problems += _found(document, _check_references(profile, models, platforms, folder))
    problems += _check_names(profiles, platforms, folder)
    raise_if_any(RegistryError, problems)
    return Registry(
        folder,
        {key: profile for key, (_, profile) in profiles.items()},
        {key: model for key, (_, model) in models.items()},
        {key: platform for key, (_, platform) in platforms.items()},
        sources or {},
    )


def _options(profile: Profile) -> Iterator[tuple[str, Setting[Any]]]:
    """What a profile could do, as if it were stated: reasons and evidence are held to the same rules."""
    for name, option in profile.options.items():
        yield f"options.{name}", Setting(value=option.set, why=option.why, evidence=option.evidence)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        do = "restore it, or mend its permissions"
        raise RegistryError(Finding("cannot be read", error.strerror or "", do, str(folder))) from None


def _read_all(kind: type[M], folder: Path, problems: list[Finding], skip: str = "") -> dict[str, tuple[Document, M]]:
    found: dict[str, tuple[Document, M]] = {}
    visible = sorted(path for path in _entries(folder) if not path.name.startswith(".") and path.name != skip)
    paths = [path for path in visible if path.suffix == ".yaml"]
    for path in visible:
        if path.suffix != ".yaml" and path.suffix.lower() in (".yaml", ".yml"):
            what, do = f"is called {path.suffix}", f"call it {path.stem}.yaml, or move it away"
            problems.append(Finding(what, "only .yaml files are read, so it would be lost in silence", do, str(path)))
    if not paths:
        problems.append(
            Finding(
                "holds no YAML files", "the registry is incomplete", "restore it, or reinstall slimserve", str(folder)
            )
        )
    for path in paths:
        try:
            document = read_document(path)
            item = validate(kind, document)
        except RegistryError as error:
            problems += error.findings
            continue
        key = item.id
        if key != path.stem:
            problems.append(
                Finding(
                    f"id = {key}",
                    f"the file is called {path.stem}; the name of a file is its id",
                    "rename one",
                    document.where(("id",)),
                )
            )
        found[key] = (document, item)
    return found


def _found(document: Document, problems: Iterable[Problem]) -> list[Finding]:
    return [Finding(p.what, p.why, p.do, document.where(p.loc)) for p in problems]


def _check_manifests(model: Model, folder: Path) -> Iterator[Problem]:
    found: list[tuple[Loc, Checkpoint]] = [(("checkpoints", name), one) for name, one in model.checkpoints.items()]
    found += [(("drafters", name, "checkpoint"), drafter.checkpoint) for name, drafter in model.drafters.items()]
    for loc, checkpoint in found:
        path = folder / "weights" / f"{checkpoint.manifest}.manifest"
        if checkpoint.bundled is not None and path.is_file():
            yield from _check_bundle(loc, checkpoint.bundled, path, folder)
        if checkpoint.manifest is not None and not path.is_file():
            yield Problem(
                (*loc, "manifest"),
                f"{dotted(loc)}.manifest = {checkpoint.manifest} does not exist",
                "without it nobody can tell whether weights are whole",
                "restore the file under profiles/weights",
            )


def _check_bundle(loc: Loc, name: str, manifest: Path, folder: Path) -> Iterator[Problem]:
    """The files of a checkpoint that comes with slimserve: they are part of the registry like all others."""
    try:
        findings = bundled.faults(bundled.place(folder, name), read_manifest(manifest))
    except RegistryError as error:
        findings = list(error.findings)
    for found in findings:
        what = f"{found.where}: {found.what}" if found.where else found.what
        yield Problem((*loc, "bundled"), f"{dotted(loc)}.bundled = {name}: {what}", found.why, found.do)


def _check_references(
    profile: Profile,
    models: dict[str, tuple[Document, Model]],
    platforms: dict[str, tuple[Document, Platform]],
    folder: Path,
) -> Iterator[Problem]:
    for key, known in (("model", models), ("platform", platforms)):
        name = getattr(profile, key)
        # A file that is there and could not be read was reported as itself.
        if name not in known and not (folder / f"{key}s" / f"{name}.yaml").exists():
            what = f"{key} = {name} does not exist"
            yield Problem((key,), what, f"profiles/{key}s has no such file", nearest(name, known))
    if profile.model not in models or profile.platform not in platforms:
        return
    model, platform = models[profile.model][1], platforms[profile.platform][1]
    if profile.quant not in model.checkpoints:
        yield Problem(
            ("quant",),
            f"quant = {profile.quant} does not exist",
            f"{model.id} has no such checkpoint",
            nearest(profile.quant, model.checkpoints),
        )
        return
    subject = Subject(profile, model, platform)
    yield from check_consistency(subject)
    yield from broken(subject)
    if any(setting.evidence.receipt is not None for _, setting in profile.settings()):
        from slimserve import covering

        yield from covering.check(subject, folder / "receipts")


@dataclass(frozen=True)
class _Texts:
    """Checks reasons and evidence of one file's settings; `sources` is None when they could not be read."""

    folder: Path
    sources: dict[str, Source] | None

    def check(self, settings: Iterable[tuple[str, Setting[Any]]]) -> Iterator[Problem]:
        seen: dict[str, str] = {}
        for key, setting in settings:
            yield from self._reason(key, setting, seen)
            yield from self._evidence(key, setting.evidence)

    def _reason(self, key: str, setting: Setting[Any], seen: dict[str, str]) -> Iterator[Problem]:
        loc = (*key.split("."), "why")
        text = " ".join(setting.why.lower().split())
        if len(_words(text) - _words(key) - _words(str(plain(setting.value))) - _FILLER) < MIN_REASON_WORDS:
            yield Problem(
                loc,
                f"{key}.why says nothing beyond key and value",
                "a reason is what the next person needs to change the value",
                "say why",
            )
        if text in seen:
            yield Problem(
                loc,
                f"{key}.why is word for word that of {seen[text]}",
                "one reason cannot explain two settings",
                "give each its own",
            )
        seen.setdefault(text, key)

    def _evidence(self, key: str, evidence: Evidence) -> Iterator[Problem]:
        loc = (*key.split("."), "evidence")
        if self.sources is not None and evidence.published is not None and evidence.published not in self.sources:
            yield Problem(
                (*loc, "published"),
                f"{key} cites {evidence.published}",
                "sources.yaml does not list it",
                nearest(evidence.published, self.sources),
            )
        if evidence.derived is not None and (told := _OBSERVED.search(evidence.derived.lower())):
            yield Problem(
                (*loc, "derived"),
                f"{key} is derived, and tells of what {told[0]}",
                "what was observed has a receipt or a publication; without one nobody can check it",
                "cite that, or give the formula",
            )
        if evidence.policy is not None and evidence.policy not in BY_ID:
            yield Problem(
                (*loc, "policy"),
                f"{key} cites the policy {evidence.policy}",
                "there is no such policy",
                nearest(evidence.policy, BY_ID),
            )
        if evidence.receipt is not None:
            yield from self._receipt((*loc, "receipt"), key, evidence.receipt)

    def _receipt(self, loc: Loc, key: str, name: str) -> Iterator[Problem]:
        """A file that is not there; of a start, one that is not as it was written (`slimserve.covering` has others)."""
        path = self.folder / "receipts" / name
        if path.is_file():
            if name.startswith(STARTS):
                try:
                    told = receipt_file.read(path)
                    why = None if told.get("kind") == "start" and told.get("cases") else "it tells of no start"
                except receipt_file.Unreadable as error:
                    why = str(error)
                if why is not None:
                    do = "restore it as it was committed, or measure anew: python -m harness.plan_check"
                    yield Problem(loc, f"{key} cites the receipt {name}", why, do)
        else:
            yield Problem(
                loc,
                f"{key} cites the receipt {name}",
                "profiles/receipts has no such file",
                "commit the receipt",
            )


def _words(text: str) -> set[str]:
    return {word.strip(".") for word in _WORD.findall(text.lower().replace("_", " "))} - {""}


def _check_names(
    profiles: dict[str, tuple[Document, Profile]], platforms: dict[str, tuple[Document, Platform]], folder: Path
) -> Iterator[Finding]:
    bearers: dict[str, list[tuple[Document, Profile]]] = defaultdict(list)
    for document, profile in profiles.values():
        for index, alias in enumerate(profile.aliases):
            where = document.where(("aliases", index))
            if alias in profiles:
                yield Finding(
                    f"the alias {alias} is dead",
                    "a profile has that id, and ids come first",
                    "choose another alias",
                    where,
                )
            for other_document, other in bearers[alias]:
                if _same_machines(platforms, profile, other):
                    yield Finding(
                        f"the alias {alias} is ambiguous",
                        f"{other_document.where(('aliases',))} gives it to {other.id} for the same machines",
                        "an alias is resolved by the machine: give it to one of the two",
                        where,
                    )
            bearers[alias].append((document, profile))
    defaults = [document for document, profile in profiles.values() if profile.default]
    for document in defaults[1:] if defaults else []:
        yield Finding(
            "is a second default", f"{defaults[0].path} is one already", "keep one", document.where(("default",))
        )
    if not defaults:
        yield Finding(
            "no profile is the default", "`slimserve` offers one first", "add `default: true` to one", str(folder)
        )


def _same_machines(platforms: dict[str, tuple[Document, Platform]], one: Profile, other: Profile) -> bool:
    if one.platform not in platforms or other.platform not in platforms:
        return False
    first, second = platforms[one.platform][1], platforms[other.platform][1]
    if first.id == second.id:
        return True
    if first.architecture != second.architecture:
        return False
    if first.gpus is None and second.gpus is None:
        return True
    return (
        first.gpus is not None
        and second.gpus is not None
        and (first.gpus.name, first.gpus.count) == (second.gpus.name, second.gpus.count)
    )
