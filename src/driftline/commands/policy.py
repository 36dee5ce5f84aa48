"""`driftline policy`: the versions of a run's policy. Here are the commands that only look: ls, show, verify, diff.

Exit codes: 0 yes; 1 no (damaged, not there, refused by the state of the run); 2 used wrongly, or without the right credentials; 3 no broker.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from driftline.commands import policy_collect, policy_keep, policy_move
from driftline.commands.common import BROKER, AsJson, RunName, Url
from driftline.commands.policy_open import Endpoint, OpenRun, Store, VersionName, opened
from driftline.commands.policy_text import age, emit, share, size, table
from driftline.messages.errors import ConfigError, IntegrityError

if TYPE_CHECKING:
    from driftline.policy_store.difference import Difference
    from driftline.policy_store.inspect import Report, Row, VersionDetail
    from driftline.policy_store.manifest import Manifest
    from driftline.policy_store.reader import Path

__all__ = ["register"]

SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    policy = typer.Typer(no_args_is_help=True, help="The versions of a run's policy: look, verify, take home, bring in, keep, free.")
    for command in (ls, show, verify, diff):
        policy.command(command.__name__)(command)
    for module in (policy_move, policy_keep, policy_collect):
        module.add_to(policy)
    app.add_typer(policy, name="policy")


def ls(
    name: RunName, url: Url = BROKER, limit: Annotated[int, typer.Option("--limit", min=1, help="How many of the newest.")] = SHOWN,
    all_: Annotated[bool, typer.Option("--all", help="Every version there is.")] = False, as_json: AsJson = False, store: Store = "",
    endpoint: Endpoint = None,
) -> None:
    """List versions, newest first: kind, sizes, how much changed, age, and who has pinned them."""

    async def body(run: OpenRun) -> int:
        from driftline.policy_store.inspect import row
        from driftline.policy_store.pins import pins

        head = await run.reader.head()
        owners: dict[int, list[str]] = {}
        held = await pins(run.bus, run.name)
        for pin in held:
            owners.setdefault(pin.link.version, []).append(pin.owner)
        found: dict[int, Row] = {}
        if head is not None:
            async for manifest in run.reader.lineage(head.link):
                if not all_ and len(found) == limit:
                    break
                found[manifest.version] = row(manifest)
        # What only a pin keeps lies below the lineage, which ends at the first version that was collected.
        for pin in sorted(held, key=lambda pin: -pin.link.version):
            if pin.link.version not in found and (all_ or len(found) < limit):
                try:
                    found[pin.link.version] = row(await run.reader.load(pin.link))
                except IntegrityError:
                    continue  # `verify` says so; a list shows what is there
        now = time.time()
        rows = [_listed(found[version], owners.get(version, []), now) for version in sorted(found, reverse=True)]
        if as_json:
            emit({"run": run.name, "head": None if head is None else head.version, "versions": rows})
        elif not rows:
            typer.echo(f"{run.name} has no version yet")
        else:
            table("", _LIST, [_list_line(entry) for entry in rows])
        return 0

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint))


_LIST = [("version", "right"), ("kind", "left"), ("step", "right"), ("weights", "right"), ("full", "right"), ("delta", "right"), ("of weights", "right"),
         ("changed", "right"), ("age", "right"), ("digest", "left"), ("pinned by", "left")]


def _listed(row: Row, owners: list[str], now: float) -> dict[str, Any]:
    return {
        "version": row.version, "kind": row.kind.value, "digest": row.digest, "learner_step": row.learner_step, "consumed": row.consumed,
        "bytes_raw": row.bytes_raw, "bytes_full": row.bytes_full, "bytes_delta": row.bytes_delta,
        "delta_share": row.bytes_delta / row.bytes_raw if row.density is not None and row.bytes_raw else None, "density": row.density,
        "at": row.at, "age_s": max(0.0, now - row.at), "pins": sorted(owners),
    }


def _list_line(entry: dict[str, Any]) -> list[str]:
    return [
        str(entry["version"]), entry["kind"], str(entry["learner_step"]), size(entry["bytes_raw"]), size(entry["bytes_full"]), size(entry["bytes_delta"]),
        share(entry["delta_share"]), share(entry["density"]), age(entry["age_s"]), entry["digest"][:12], ", ".join(entry["pins"]),
    ]


def show(
    name: RunName, version: VersionName = "head", url: Url = BROKER, as_json: AsJson = False, store: Store = "", endpoint: Endpoint = None,
) -> None:
    """Show one version: what it is made of and from, the ways to it with their costs, and its tensors."""

    async def body(run: OpenRun) -> int:
        from driftline.policy_store.inspect import detail

        manifest = await run.manifest(version)
        found = detail(manifest)
        paths = await run.reader.paths(manifest)
        if as_json:
            emit(_shown(manifest, found, paths))
        else:
            _print_version(manifest, found, paths)
        return 0

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint))


def _shown(manifest: Manifest, found: VersionDetail, paths: list[Path]) -> dict[str, Any]:
    batch = manifest.batch
    return {
        **asdict(found.row), "kind": found.row.kind.value, "run": manifest.run, "seal": found.seal, "parent": found.parent,
        "chain": [link.version for link in manifest.chain], "consumed": list(found.consumed), "numerics": found.numerics,
        "batch": None if batch is None else {"digest": batch.digest, "size": batch.size},
        "paths": [{"path": str(path), "nbytes": path.nbytes} for path in paths], "tensors": [asdict(tensor) for tensor in found.tensors],
    }


def _print_version(manifest: Manifest, found: VersionDetail, paths: list[Path]) -> None:
    row = found.row
    made_from = f"version {found.parent}" if found.parent is not None else "nothing: the first"
    facts = [
        ("digest", row.digest), ("seal", found.seal), ("kind", row.kind.value), ("made from", made_from),
        ("learner step", str(row.learner_step)), ("age", age(max(0.0, time.time() - row.at))), ("weights", size(row.bytes_raw)),
        ("full", size(row.bytes_full) if row.bytes_full else "-"),
        ("delta", f"{size(row.bytes_delta)}, {share(row.density)} of the elements changed" if row.density is not None else "-"),
        ("trained on", f"{row.consumed} trajectories" if row.consumed else "nothing"),
        ("batch", f"{manifest.batch.digest}, {size(manifest.batch.size)}" if manifest.batch is not None else "not recorded"),
        *((f"numerics {key}", str(value)) for key, value in sorted(found.numerics.items())),
    ]
    table(f"{manifest.run} version {row.version}", [("", "left"), ("", "left")], [list(fact) for fact in facts])
    table("ways to it, cheapest first", [("bytes", "right"), ("way", "left")], [[size(path.nbytes), str(path)] for path in paths])
    table("tensors", [("name", "left"), ("dtype", "left"), ("shape", "left"), ("bytes", "right"), ("shards", "right"), ("coded", "left"), ("digest", "left")], [
        [tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)) or "scalar", size(tensor.nbytes), str(tensor.shards),
         ", ".join(f"{count} {codec}" for codec, count in sorted(tensor.codecs.items())), tensor.digest[:12]]
        for tensor in found.tensors
    ])


def verify(
    name: RunName, version: Annotated[str, typer.Argument(metavar="[VERSION]", help="A number, head, head~3 or start; the head if nothing is said.")] = "",
    url: Url = BROKER, all_: Annotated[bool, typer.Option("--all", help="Every version there is, the pinned ones too.")] = False,
    last: Annotated[int | None, typer.Option("--last", min=1, help="The newest so many.")] = None, as_json: AsJson = False, store: Store = "",
    endpoint: Endpoint = None,
) -> None:
    """Read every way to a version and compare what comes out with its digest. Exit code 1 when any is damaged, even if another leads there."""
    if sum((bool(version), all_, last is not None)) > 1:
        raise ConfigError("say which versions, in one way", field="VERSION", value=version, remedy="a version, or --last N, or --all")

    async def body(run: OpenRun) -> int:
        from driftline.policy_store.inspect import verify_manifest

        reports = []
        for manifest in await _chosen(run, version or "head", all_, last):
            total = sum(path.nbytes for path in await run.reader.paths(manifest))
            with run.meter.stage(f"version {manifest.version}", total):
                reports.append(await verify_manifest(run.reader, manifest))
            if not as_json:
                _print_report(reports[-1])
        intact = bool(reports) and all(report.intact for report in reports)
        if as_json:
            emit({"run": run.name, "intact": intact, "versions": [
                {"version": report.version, "digest": report.digest, "ok": report.ok, "intact": report.intact,
                 "paths": [asdict(path) for path in report.paths]} for report in reports
            ]})
        return 0 if intact else 1

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint))


async def _chosen(run: OpenRun, version: str, all_: bool, last: int | None) -> list[Manifest]:
    from driftline.policy_store.pins import pins

    if not all_ and last is None:
        return [await run.manifest(version)]
    found: dict[int, Manifest] = {}
    async for manifest in run.reader.lineage((await run.head()).link):
        if last is not None and len(found) == last:
            break
        found[manifest.version] = manifest
    if all_:
        for pin in await pins(run.bus, run.name):
            if pin.link.version not in found:
                found[pin.link.version] = await run.reader.load(pin.link)
    return [found[number] for number in sorted(found, reverse=True)]


def _print_report(report: Report) -> None:
    from driftline.services.audit.text import plain

    if not report.paths:
        typer.echo(f"FAIL  version {report.version}: no full leads to it")
    for path in report.paths:
        typer.echo(plain(f"{'ok  ' if path.ok else 'FAIL'}  version {report.version}  {size(path.nbytes):>10}  {path.path}  {path.error}".rstrip()))


def diff(
    name: RunName, old: Annotated[str, typer.Argument(metavar="OLD", help="A version: a number, head, head~3 or start.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Another.")] = "head", url: Url = BROKER,
    top: Annotated[int, typer.Option("--top", min=0, help="Only the most changed; 0: all.")] = 0, as_json: AsJson = False, store: Store = "",
    endpoint: Endpoint = None,
) -> None:
    """Compare two versions tensor by tensor: changed elements, the largest difference, in ulps too. Most changed first."""

    async def body(run: OpenRun) -> int:
        from driftline.policy_store.difference import compare

        before, after = await run.manifest(old), await run.manifest(new)
        digests = tuple({entry.name: entry.digest for entry in manifest.tensors} for manifest in (before, after))
        ways = [await run.reader.paths(manifest) for manifest in (before, after)]
        with run.meter.stage("read", sum(paths[0].nbytes for paths in ways if paths)):
            first = await run.reader.materialise_manifest(before)
            for same in [name for name in first if digests[0][name] == digests[1].get(name)]:
                del first[same]
            found = compare(first, await run.reader.materialise_manifest(after), (digests[0], digests[1]))
        shown = found[:top] if top else found
        if as_json:
            emit({"run": run.name, "old": before.version, "new": after.version, "tensors_changed": len(found),
                  "elements": after.elements, "elements_changed": sum(item.changed for item in found),
                  "tensors": [{**asdict(item), "change": item.change.value, "share": item.share} for item in shown]})
            return 0
        table(f"version {before.version} to {after.version}: {len(found)} of {len(after.tensors)} tensors changed", _DIFF, [_diff_line(item) for item in shown])
        if len(shown) < len(found):
            typer.echo(f"and {len(found) - len(shown)} more")
        return 0

    sys.exit(opened(name, url, body, store=store, endpoint=endpoint))


_DIFF = [("tensor", "left"), ("dtype", "left"), ("change", "left"), ("elements", "right"), ("changed", "right"), ("share", "right"), ("largest", "right"),
         ("ulps", "right"), ("not finite", "right"), ("digest", "left")]


def _diff_line(item: Difference) -> list[str]:
    return [
        item.name, item.dtype, item.change.value, str(item.elements), str(item.changed), share(item.share), f"{item.largest:.3g}" if item.changed else "-",
        "-" if item.ulps is None else str(item.ulps), str(item.not_finite), f"{item.old_digest[:8] or '-'} -> {item.new_digest[:8] or '-'}",
    ]
