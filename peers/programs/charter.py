"""What the owner of a run says: init, invite, ban, unban, charter; and a key of itself: revoke."""

from __future__ import annotations

import contextlib
import datetime
import os
import shlex
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.clock import unix_s
from peers.net.charter.signed import make_token, seal_charter, seal_revocation, write_charter
from peers.net.identity import Identity
from peers.programs.manifest_pinning import pinned
from peers.programs.stage_choice import check_stages
from peers.programs.tool_options import BanOptions, UnbanOptions, check_text
from peers.start_line import TRAINED_ON, TRAINER_KEY, allowing, as_given, program
from peers.storage import atomic_file, charters_folder
from peers.storage.atomic_file import as_setup_error
from swarm import charter as rules
from swarm.charter import ROLES, AdmissionRule, Charter
from swarm.errors import SetupError, clean, count
from swarm.ids import PeerId, RunName, fingerprint_of
from swarm.manifest import MAX_FOUNDERS, demo_run, load_run

if TYPE_CHECKING:
    from peers.net.node import Node
    from peers.options import RunOptions
    from peers.programs import tool_options

DAY_S = 86_400
FIND_S = 10.0
CHECKPOINT_EVERY = 20
"""Steps of the run that is made without a manifest: about ten seconds."""


# --- on this machine ---


def run_init(options: tool_options.InitOptions) -> None:
    """Make a folder with the manifest, the charter, and keys: of the owner, a trainer, an auditor, a peer of
    each stage.

    The manifest names the trainer, which vouches for peers, and these peers as founders. The auditor is a
    second trainer: the owner's key is the bootstrap's, and no two programs can have one identity.

    Raises:
        SetupError: the manifest or its data cannot be used, or there is such a run in the folder already.
    """
    from swarm.audit import is_audited

    folder = options.name
    taken = [name for name in ("owner.key", "run.toml", "charter") if (folder / name).exists()]
    if taken:
        raise SetupError(f"{folder / taken[0]} is there already: name another folder for another run")
    check_text((*options.data, *options.eval_data))
    run = replace(demo_run(), checkpoint_every=CHECKPOINT_EVERY)
    if options.manifest is not None:
        run = load_run(options.manifest)
    elif options.data:
        run = replace(run, data=replace(run.data, source="files"))
    if run.admission.owner:
        raise SetupError("the manifest has an owner already (admission.owner): leave it out, a key is made")
    keys = {who: Identity.generate() for who in ("owner", "trainer", "auditor")}
    keys |= {f"peer{stage}": Identity.generate() for stage in range(min(run.cells, MAX_FOUNDERS))}
    owner, trainer, auditor, *founders = keys.values()
    admission = replace(
        run.admission,
        owner=owner.peer_id,
        trainers=(*run.admission.trainers, trainer.peer_id, auditor.peer_id),
        founders=run.admission.founders or tuple(one.peer_id for one in founders),
    )
    run = replace(run, admission=admission)
    try:
        run = replace(run, name=folder.absolute().name)
    except SetupError as error:
        words = "a run is called as its folder, so take another one"
        raise SetupError(f"{folder}: {words}. {error.text}") from None
    run = pinned(run, options.data, options.tokenizer, options.start, options.eval_data)
    charter = rules.make(
        name=run.name, run=run.id, sequence=1, expires=int(unix_s() + options.days * DAY_S),
        peers=AdmissionRule(options.peers), keepers=AdmissionRule(options.keepers),
        work_bits=options.work_bits,
    )  # fmt: skip
    with as_setup_error(f"{folder} cannot be made", ". Name another folder"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with as_setup_error("cannot write", "name another", folder=folder), contextlib.ExitStack() as undo:
        for who, identity in keys.items():
            identity.save(path := folder / f"{who}.key")
            undo.callback(path.unlink)  # half a run would be in the way of the next try
        atomic_file.write_whole(folder / "run.toml", run.to_toml().encode())
        undo.callback((folder / "run.toml").unlink)
        write_charter(folder / "charter", owner.peer_id, seal_charter(charter, owner))
        undo.pop_all()
    print(f"run {RunName(run.name, fingerprint_of(owner.peer_id))} ({run.id})")
    print(f"{folder}/owner.key is the run: keep a copy where nobody finds it")
    here, data = shlex.quote(str(folder)), as_given(options, *TRAINED_ON)
    start, code = as_given(options, "start"), allowing(run.code)
    print(f"Train it on this machine:\n    {program()} up {here}{data}{start}")
    print(
        "Or on many. On one that all others can reach, with its name or address in place of HOST:\n"
        f"    {program()} bootstrap --manifest {here}/run.toml --charter {here}/charter --identity "
        f"{here}/owner.key --port 31337 --announce HOST:31337 --join-file join.txt\n"
        "and on any that have join.txt, which the bootstrap writes:\n"
        f"    {program()} train @join.txt --identity {here}/{TRAINER_KEY}{data}{code}"
    )
    for stage in range(run.cells):
        key = f" --identity {here}/peer{stage}.key" if f"peer{stage}" in keys else ""
        print(f"    {program()} peer @join.txt --stage {stage}{key}{start}{code}")
    print(f"    {program()} keeper @join.txt --dir ckpt{code}\n    {program()} dashboard @join.txt")
    needs = {"open": "alone", "list": "once you named them (swarm charter)", "token": "and a --token each"}
    print(f"Others join with join.txt {needs[options.peers]}:\n    swarm peer @join.txt --identity peer.key")
    if code:  # whether they trust the owner with it is theirs to say
        print(f"For its code each of them needs the package that it is in, and at the end of that line{code}")
    if not (is_audited(run) and run.adds_exactly):  # see docs/threats.md
        print("No liar in it is found: it adds floats, or its codecs leave numbers out. Know its peers")
    elif run.cells == run.S:
        print(f"If you like, audit:\n    {program()} audit @join.txt --identity {here}/auditor.key{code}")
    if options.peers == "token":
        invite = f"{program()} invite --manifest {here}/run.toml --owner {here}/owner.key"
        print(f"Each of them needs a token:\n    {invite}")


def run_invite(options: tool_options.InviteOptions) -> None:
    """Print a token, and aside how to take it back. Raises SetupError: the key is not the owner's."""
    run, owner = load_run(options.manifest), _owner_key(options.owner)
    if not run.pinned:
        raise SetupError(f"{options.manifest} is not published yet: give the run.toml of swarm init")
    if run.admission.owner != owner.peer_id:
        raise SetupError(f"{options.owner} is not the key of the owner of {run.name!r}")
    expires, seed = int(unix_s() + options.days * DAY_S), os.urandom(32)
    print(make_token(run.id, owner, options.role, expires=expires, uses=options.uses, seed=seed))
    ban = f"{program()} ban {Identity(seed).peer_id} @join.txt --owner {shlex.quote(str(options.owner))}"
    print(f"take it back, from all that use it:\n    {ban} --why 'its token'", file=sys.stderr)


# --- at the run ---


@contextlib.asynccontextmanager
async def _at_the_run(
    options: RunOptions, owner: Identity | None = None, identity: Path | None = None
) -> AsyncIterator[tuple[Node, Charter]]:
    """A node in the network of the run, and the highest charter, be it expired.

    Raises:
        SetupError: no route to the run, it has no charter, or its owner has another key.
    """
    from peers.net.node import Node

    name = RunName.parse(options.run)
    async with Node(
        join=options.join,
        run_id=None if name else options.run,
        charters=charters_folder(),
        identity_path=identity,
    ) as node:
        charters = node.directory.charters
        if name is not None:
            await charters.find(name, timeout_s=FIND_S, expired=True)
            await charters.ask()  # for revocations, now that the run is known
        else:
            await node.directory.fetch_manifest(options.run)
        if charters.charter is None:
            raise SetupError(
                f"the run {options.run} has no charter: one that swarm init makes has one, published by "
                "swarm bootstrap --charter"
            )
        if owner is not None and owner.peer_id != charters.owner:
            raise SetupError(
                f"--owner is not the key of the owner of {charters.name}: its fingerprint is "
                f"{fingerprint_of(owner.peer_id)}"
            )
        yield node, charters.charter


def _owner_key(path: Path) -> Identity:
    """The owner's key, before anything is asked of others. Raises SetupError: there is none."""
    try:
        with path.open("rb") as file:  # of a large one that was meant for something else little is read
            return Identity.from_file_bytes(file.read(4096))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"--owner {path} is no key: {getattr(error, 'strerror', error)}. Give the owner.key that swarm "
            "init made, or a copy of it: no other one changes its run"
        ) from None


async def _publish(node: Node, old: Charter, owner: Identity, words: str, **changes: Any) -> Charter:
    """The next charter, once it holds: with these changes, and the keys that revoked themselves since the
    last one; those that the owner named, and others while there is room for them."""
    charters, known = node.directory.charters, old.revocations
    seen = sorted(charters.revoked.difference(known), key=lambda peer: (not charters.names(peer), peer))
    most = max(rules.MAX_REVOCATIONS_TAKEN - len(known), sum(map(charters.names, seen)))
    charter = rules.succeed(old, now=unix_s(), revocations=(*known, *seen[:most]), **changes)
    if await charters.publish(charter, owner) < 2:  # one is ours
        raise SetupError("no node of the run took the new charter: try again, and check the clocks (NTP)")
    await charters.ask()
    if charters.charter != charter:
        raise SetupError("another charter was signed in the same moment, and holds: do this again")
    print(
        f"{words}. Charter {charter.sequence} holds until {_date(charter.expires)}; all peers follow in 30 s"
    )
    return charter


async def run_ban(options: UnbanOptions) -> None:
    """Publish a charter with one ban more, or less. Raises SetupError."""
    owner = _owner_key(options.owner)
    async with _at_the_run(options, owner) as (node, charter):
        if not isinstance(options, BanOptions):
            bans, words = rules.unban(charter, options.peer), "is not banned"
        elif options.peer == owner.peer_id:
            raise SetupError(f"{options.peer} owns the run: if its key was stolen, end it by swarm revoke")
        else:
            bans, words = rules.ban(charter, options.peer, options.why), "is banned"
        await _publish(node, charter, owner, f"{options.peer} {words}", bans=bans)


async def run_charter(options: tool_options.CharterOptions) -> None:
    """Print the charter; with the owner's key, change and renew it first. Raises SetupError."""
    owner = None if options.owner is None else _owner_key(options.owner)
    async with _at_the_run(options, owner) as (node, charter):
        changes, trainers = _changes(options, charter), options.trainers or options.name_trainer
        if owner is None and changes:
            raise SetupError("only the owner changes a charter: give its key as --owner")
        if options.trusted_stages or trainers:
            run = await node.directory.fetch_manifest(charter.run)
            check_stages("--trusted-stages", options.trusted_stages or (), run)
            if trainers and run.admission.trainers:
                raise SetupError(
                    f"--trainers and --name-trainer change nothing: the manifest of {run.name!r} names its "
                    "trainers, and a charter can only ban them"
                )
        if owner is not None:
            words = "The charter is renewed"
            charter = await _publish(node, charter, owner, words, **changes, days=options.days)
        print(told(charter, node.directory.charters.owner))


def _changes(options: tool_options.CharterOptions, charter: Charter) -> dict[str, Any]:
    gone, found = set(options.unname), dict[str, Any]()
    for role in ROLES:
        old = charter.rule(role)
        named = {*old.named, *getattr(options, f"name_{role}")} - gone
        found[f"{role}s"] = AdmissionRule(getattr(options, f"{role}s") or old.door, tuple(sorted(named)))
    found["founders"] = tuple(sorted({*charter.founders, *options.founder} - gone))
    found["work_bits"], found["trusted_stages"] = options.work_bits, options.trusted_stages
    return {name: new for name, new in found.items() if new not in (None, getattr(charter, name))}


def told(charter: Charter, owner: PeerId) -> str:
    lines = [
        f"{RunName(charter.name, fingerprint_of(owner))}: charter {charter.sequence}, until "
        f"{_date(charter.expires)}",
        f"run {charter.run}, owner {owner}",
    ]
    for role in ROLES:
        rule = charter.rule(role)
        stamp = f" with {charter.work_bits} bits of work" if charter.work_bits and rule.door == "open" else ""
        lines += [f"{role}s: {rule.door}{stamp}", *(f"  {peer}" for peer in rule.named)]
    if charter.trusted_stages:
        lines.append(f"trusted stages: {', '.join(map(str, charter.trusted_stages))}")
    bans = [f"{one.peer} {clean(one.why)}" for one in charter.bans]
    lists = {"founders": charter.founders, "revoked keys": charter.revocations, count(len(bans), "ban"): bans}
    for words, peers in lists.items():
        lines += [f"{words}:", *(f"  {peer}" for peer in peers)] if peers else []
    return "\n".join(lines)


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


async def run_revoke(options: tool_options.RevokeOptions) -> None:
    """Have a key say that it is to be trusted no more. Raises SetupError."""
    identity = Identity.load(options.identity)
    # With the key itself: what a peer says of itself first hand has a place in a full node.
    async with _at_the_run(options, identity=options.identity) as (node, charter):
        sealed = seal_revocation(charter.run, identity)
        if await node.directory.charters.revoke(charter.run, identity.peer_id, sealed) < 2:
            raise SetupError("no node of the run took the revocation: try again, and check the clocks (NTP)")
        print(
            f"{identity.peer_id} is revoked: peers that are there now refuse it for as long as they live. "
            "Ask the owner to run swarm charter --owner within 10 minutes: then it is so for good"
        )
