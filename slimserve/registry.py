"""The registry: every file under profiles/, checked by itself and against the others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from slimserve.errors import Finding, RegistryError, UsageError, raise_if_any
from slimserve.model import Checkpoint, Model
from slimserve.platform import Platform
from slimserve.policies import BY_ID, Subject, broken
from slimserve.profile import SCORES, Evidence, Id, Profile, Setting, Text
from slimserve.shapes import Loc, Matching, Problem, dotted, nearest, plain
from slimserve.validate import validate
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
_MEBIBYTES = re.compile("[1-9][0-9]{0,8}")
MIN_REASON_WORDS = 4
# Beginnings of the variables that a profile may set.
CONFIGURING = tuple("VLLM_ NCCL_ GLOO_ OMP_ KMP_ MKL_ TORCH PYTORCH_ TRITON_ FLASHINFER_ CUDA_".split())


@dataclass(frozen=True, kw_only=True)
class Source:
    """A public text that evidence cites."""

    title: Text
    publisher: Text
    date: Annotated[str, Matching(r"20[0-9]{2}(-(0[1-9]|1[0-2])(-[0-3][0-9])?)?", "a date such as 2026-08")]
    url: Text | None = None


@dataclass(frozen=True, kw_only=True)
class Sources:
    """profiles/sources.yaml"""

    sources: dict[Id, Source]


@dataclass(frozen=True)
class Registry:
    """All profiles, models, platforms and sources, by id; every cross reference holds."""

    folder: Path
    profiles: dict[str, Profile]
    models: dict[str, Model]
    platforms: dict[str, Platform]
    sources: dict[str, Source]

    def subject(self, profile: Profile) -> Subject:
        """`profile` with the model and platform that it names."""
        return Subject(profile, self.models[profile.model], self.platforms[profile.platform])

    def candidates(self, name: str) -> tuple[Profile, ...]:
        """Every profile that `name` may mean: one for an id, one or more for an alias.

        Raises:
            UsageError: nothing has that name; the nearest names are given.
        """
        if name in self.profiles:
            return (self.profiles[name],)
        found = tuple(profile for profile in self.profiles.values() if name in profile.aliases)
        if found:
            return found
        names = {*self.profiles, *(alias for profile in self.profiles.values() for alias in profile.aliases)}
        raise UsageError(
            Finding(f"there is no profile {name!r}", "only profiles of the registry can be run", nearest(name, names))
        )

    @property
    def default(self) -> Profile:
        """The embedded default."""
        return next(profile for profile in self.profiles.values() if profile.default)


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
        listed = checkpoint.manifest is not None
        if listed and not (folder / "weights" / f"{checkpoint.manifest}.manifest").is_file():
            yield Problem(
                (*loc, "manifest"),
                f"{dotted(loc)}.manifest = {checkpoint.manifest} does not exist",
                "without it nobody can tell whether weights are whole",
                "restore the file under profiles/weights",
            )


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
        if evidence.policy is not None and evidence.policy not in BY_ID:
            yield Problem(
                (*loc, "policy"),
                f"{key} cites the policy {evidence.policy}",
                "there is no such policy",
                nearest(evidence.policy, BY_ID),
            )
        if evidence.receipt is not None and not (self.folder / "receipts" / evidence.receipt).is_file():
            yield Problem(
                (*loc, "receipt"),
                f"{key} cites the receipt {evidence.receipt}",
                "profiles/receipts has no such file",
                "commit the receipt",
            )


def _words(text: str) -> set[str]:
    return {word.strip(".") for word in _WORD.findall(text.lower().replace("_", " "))} - {""}


def check_environment(profile: Profile, reserved: frozenset[str]) -> Iterator[Problem]:
    """Every variable of a profile that is not its own to set, or that nothing would read as it is written.

    Args:
        profile: of the registry, or one with values replaced.
        reserved: variables that no profile may set.
    """
    for name, setting in profile.environment.items():
        loc = ("environment", name)
        if {"KEY", "TOKEN", "SECRET", "PASSWORD"} & set(name.split("_")):
            yield Problem(
                loc,
                f"environment.{name}",
                "a secret does not belong in a profile",
                "give it at the start, by environment",
            )
        elif name in reserved:
            yield Problem(loc, f"environment.{name}", "it is fixed for every profile by slimserve itself", "remove it")
        elif not name.startswith(CONFIGURING):
            why = f"it configures neither the engine nor a library of it: those begin with {', '.join(CONFIGURING)}"
            yield Problem(loc, f"environment.{name}", why, "remove it")
        elif name == SCORES and not _MEBIBYTES.fullmatch(setting.value):
            what, why = f"environment.{name} = {setting.value[:40]}", "it is not a whole number of MiB above 0"
            yield Problem((*loc, "value"), what, why, 'give one, such as "512"')


def check_consistency(subject: Subject) -> Iterator[Problem]:
    """Every way in which a profile contradicts itself, its model or its platform."""
    engine, model, platform = subject.profile.engine, subject.model, subject.platform
    if subject.profile.status == "measured" and not any(s.evidence.receipt for _, s in subject.profile.settings()):
        yield Problem(
            ("status",),
            "status = measured, but no setting cites a receipt",
            "measured is earned by receipts",
            "use unmeasured",
        )
    sizes = [key for key in ("gpu_memory_utilization", "kv_cache_memory_bytes") if getattr(engine, key) is not None]
    if len(sizes) != 1:
        yield Problem(
            ("engine",),
            f"{len(sizes)} of gpu_memory_utilization and kv_cache_memory_bytes are stated",
            "each of them sizes the KV cache",
            "state exactly one",
        )
    elif platform.kind == "cuda" and sizes[0] == "kv_cache_memory_bytes":
        yield Problem(
            ("engine", sizes[0]),
            f"engine.{sizes[0]} on a CUDA platform",
            "whether cards are free and large enough is judged by the share of their memory",
            "state gpu_memory_utilization",
        )
    elif platform.kind == "cpu" and sizes[0] == "gpu_memory_utilization":
        yield Problem(
            ("engine", sizes[0]),
            f"engine.{sizes[0]} on a CPU platform",
            "there is no GPU memory to use",
            "state kv_cache_memory_bytes",
        )
    if engine.max_model_len.value > model.geometry.max_position_embeddings:
        yield Problem(
            ("engine", "max_model_len", "value"),
            f"engine.max_model_len = {engine.max_model_len.value}",
            f"{model.id} was trained for {model.geometry.max_position_embeddings} positions",
            f"use at most {model.geometry.max_position_embeddings}",
        )
    tp = engine.tensor_parallel_size.value
    ranks = tp * (engine.data_parallel_size.value if engine.data_parallel_size else 1)
    legal = model.geometry.legal_tensor_parallel()
    if tp not in legal:
        yield Problem(
            ("engine", "tensor_parallel_size", "value"),
            f"engine.tensor_parallel_size = {tp} does not split the heads of {model.id}",
            f"{model.geometry.num_attention_heads} query heads must divide evenly, "
            f"{model.geometry.num_key_value_heads} KV heads divide or be replicated evenly",
            f"legal counts: {', '.join(map(str, legal))}",
        )
    available = (platform.gpus.count if platform.gpus else 1) * platform.nodes
    if ranks != available:
        yield Problem(
            ("engine", "tensor_parallel_size", "value"),
            f"the profile makes {ranks} ranks for {available} devices of {platform.id}",
            "each rank owns one device",
            f"make tensor_parallel_size x data_parallel_size = {available}",
        )
    yield from _check_nodes(subject)
    speculation = engine.speculative_config.value if engine.speculative_config else None
    if speculation is not None and speculation.model is not None and speculation.model not in model.drafters:
        yield Problem(
            ("engine", "speculative_config", "value", "model"),
            f"engine.speculative_config.model = {speculation.model} does not exist",
            f"{model.id} has no such drafter",
            nearest(speculation.model, model.drafters),
        )
    budget = engine.max_num_batched_tokens.value
    if not engine.enable_chunked_prefill.value and budget < engine.max_model_len.value:
        yield Problem(
            ("engine", "max_num_batched_tokens", "value"),
            f"engine.max_num_batched_tokens = {budget} < max_model_len = {engine.max_model_len.value}",
            "without chunked prefill a prompt must fit into one step",
            "turn chunked prefill on, or raise it",
        )
    if budget < engine.max_num_seqs.value:
        yield Problem(
            ("engine", "max_num_batched_tokens", "value"),
            f"engine.max_num_batched_tokens = {budget} < max_num_seqs = {engine.max_num_seqs.value}",
            "a decode step takes a token of each sequence",
            "raise it",
        )


def _check_nodes(subject: Subject) -> Iterator[Problem]:
    """The engine learns from two keys how many nodes there are and which replicas are this one's."""
    engine, nodes = subject.profile.engine, subject.platform.nodes
    replicas = engine.data_parallel_size.value if engine.data_parallel_size else 1
    wanted = {"nnodes": nodes, "data_parallel_size_local": replicas // nodes} if nodes > 1 else {}
    for name in ("nnodes", "data_parallel_size_local"):
        setting = getattr(engine, name)
        if (setting.value if setting else None) != wanted.get(name):
            yield Problem(
                ("engine", name) if setting else ("engine",),
                f"engine.{name} is {setting.value if setting else 'not stated'}",
                f"{subject.platform.id} has {nodes} nodes, over which {replicas} replicas are dealt out",
                f"state {wanted[name]}" if name in wanted else "remove it",
            )
    if nodes > 1 and replicas % nodes:
        yield Problem(
            ("engine", "data_parallel_size", "value") if engine.data_parallel_size else ("engine",),
            f"{replicas} replicas on {nodes} nodes",
            "a replica's attention stays within a node, whose links are those that can carry it",
            f"make data_parallel_size a multiple of {nodes}",
        )


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
