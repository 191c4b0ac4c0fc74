"""What owners type, and how a program is admitted: what is made, printed, published, and refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from peers.cli import build_parser, main
from peers.clock import unix_s
from peers.events import Event, Note
from peers.net.charter import entry, signed
from peers.net.charter.doorkeeper import Doorkeeper
from peers.net.charter.keeper import CharterKeeper
from peers.net.identity import Identity
from peers.options import BootstrapOptions, options_from
from peers.programs import charter as commands
from peers.programs import roles, tool_options
from peers.programs.audit import Audit, check_audited
from peers.programs.roles import RENEWED_S, Bootstrap
from peers.programs.stage_choice import choose_stage
from peers.start_line import program
from peers.storage import atomic_file
from swarm import charter as rules
from swarm.charter import AdmissionRule, AdmissionTerms, Ban, Charter
from swarm.errors import SetupError
from swarm.ids import RunName, fingerprint_of
from swarm.manifest import AdmissionSpec, CustomModelSpec, IslandsSpec, Run, audit_run, load_run
from swarm.records import PeerRecord
from tests.net.directory.memory_dht import MemoryDht, MemoryNode

OWNER, KIM, SAM = (Identity(bytes([n]) * 32) for n in range(1, 4))


def unpinned(folder: Path) -> Path:
    path = folder / "a.toml"
    run = replace(audit_run(stages=2, steps=3), dtype="float32")
    path.write_text(run.to_toml().replace("tokens = 4096", "tokens = 0"))
    return path


def init(folder: Path, *more: str) -> int:
    return main(["init", str(folder), *more])


# --- on this machine ----------------------------------------------------------------------------------------


def test_a_run_is_made_with_all_that_its_owner_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert init(folder, "--manifest", str(unpinned(tmp_path)), "--peers", "token") == 0
    run, (charter, owner, _) = load_run(folder / "run.toml"), signed.read_charter(folder / "charter")
    keys = {path.stem: Identity.load(path).peer_id for path in folder.glob("*.key")}
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.key")} == {0o600}
    assert run.pinned
    assert (run.name, run.admission.owner) == ("mine", keys["owner"])
    assert set(run.admission.trainers) == {keys["trainer"], keys["auditor"]}
    assert set(run.admission.founders) == {keys["peer0"], keys["peer1"]}
    assert (charter.name, charter.run, charter.sequence, owner) == ("mine", run.id, 1, keys["owner"])
    assert (charter.peers, charter.trainers, charter.keepers) == (
        AdmissionRule("token"),
        AdmissionRule("list"),
        AdmissionRule(),
    )
    assert unix_s() + 29 * 86_400 < charter.expires < unix_s() + 31 * 86_400
    printed = capsys.readouterr().out
    assert printed.startswith(f"run mine@{fingerprint_of(owner)} ({run.id})\n")
    for line in (
        f"swarm up {folder}",
        "swarm bootstrap --manifest",
        "swarm train @join.txt",
        "swarm audit @join.txt",
        "swarm peer @join.txt --stage 1",
    ):
        assert f"\n    {program().removesuffix('swarm')}{line}" in printed
    assert f"Each of them needs a token:\n    {program()} invite" in printed
    for line in re.findall(r"^    \S*swarm (.*)$", printed, re.MULTILINE):
        words = shlex.split(line.replace("@join.txt", "--run ours@" + "a" * 20 + " --join x"))
        assert build_parser().parse_args(words), "each can be pasted"

    assert init(folder) != 0
    assert f"{folder}/owner.key is there already: name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("peers", "with_what"),
    [
        ("open", "join.txt alone:"),
        ("list", "join.txt once you named them"),
        ("token", "and a --token each:"),
    ],
)
def test_what_others_need_to_join_is_said_as_the_charter_has_it(
    peers: str, with_what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That join.txt alone is enough was said of runs that refuse who has no token, or is not on the list."""
    assert init(tmp_path / "mine", "--manifest", str(unpinned(tmp_path)), "--peers", peers) == 0
    said = capsys.readouterr().out
    assert with_what in said and ("join.txt alone" in said) == (peers == "open")


def test_what_others_have_to_allow_is_said_where_the_run_has_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their line was refused on their machines, and nothing had told the owner."""
    model = CustomModelSpec(kind="code", source="my_package.models:build", stages=2, vocab_size=256)
    monkeypatch.setattr(commands, "pinned", lambda run, *_: replace(run, model=model))
    assert init(tmp_path / "mine", "--manifest", str(unpinned(tmp_path))) == 0
    line, *more = capsys.readouterr().out.partition("Others join")[2].splitlines()[1:]
    assert line.endswith("swarm peer @join.txt --identity peer.key")
    assert "package" in more[0] and more[0].endswith(" --allow-code my_package")


async def test_a_stranger_that_audits_is_not_sent_for_an_invitation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run that admits by token it was told to ask for one, with which it could not audit either."""

    class Joined:
        peer_id, run_id, addresses = KIM.peer_id, "5a7c" * 8, ()

        def __init__(self, **_: Any) -> None: ...

        async def __aenter__(self) -> Joined:
            return self

        async def __aexit__(self, *_: object) -> None: ...

        async def manifest(self) -> Run:
            return audit_run(stages=2, steps=3)

    async def no_token(*_: object) -> None:
        raise SetupError("the run does not admit this peer: it has no token")

    monkeypatch.setattr(roles, "Node", Joined)
    monkeypatch.setattr(roles, "enter", no_token)
    monkeypatch.setattr(roles.Daemon, "spawn", lambda *_, **__: None)
    address = f"/ip4/127.0.0.1/tcp/24100/p2p/{KIM.peer_id}"
    options = tool_options.AuditOptions(run=Joined.run_id, join=(address,), identity=tmp_path / "kim.key")
    with pytest.raises(SetupError, match=r"may not audit run 'counting': give the key of its owner"):
        await Audit(options, emit=lambda _: None).run()


def test_the_keys_that_are_made_may_train_and_audit_beside_trainers_that_the_manifest_names(
    tmp_path: Path,
) -> None:
    manifest = tmp_path / "named.toml"
    run = replace(audit_run(stages=2, steps=3), admission=AdmissionSpec(trainers=(KIM.peer_id,)))
    manifest.write_text(run.to_toml())
    assert init(tmp_path / "mine", "--manifest", str(manifest)) == 0
    mine = [Identity.load(tmp_path / "mine" / f"{name}.key").peer_id for name in ("trainer", "auditor")]
    assert set(load_run(tmp_path / "mine" / "run.toml").admission.trainers) == {KIM.peer_id, *mine}


@pytest.mark.parametrize("unchecked", ["exact_sums = false", 'forward = "topk:0.1+bf16"'])
def test_of_a_run_in_which_nobody_finds_who_lies_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unchecked: str
) -> None:
    """Strangers could add and answer what they like; no auditor could join it either."""
    manifest = unpinned(tmp_path)
    key = unchecked.partition(" = ")[0]
    manifest.write_text(re.sub(rf"(?m)^{key} = .*$", unchecked, manifest.read_text(), count=1))
    assert unchecked in manifest.read_text()
    assert init(tmp_path / "mine", "--manifest", str(manifest)) == 0
    printed = capsys.readouterr().out
    assert "No liar in it is found" in printed and "swarm audit" not in printed


def test_the_run_that_is_made_without_a_manifest_needs_no_data_and_is_kept(tmp_path: Path) -> None:
    assert init(tmp_path / "mine") == 0
    run = load_run(tmp_path / "mine" / "run.toml")
    assert (run.data.source, run.pinned) == ("tales", True) and run.checkpoint_every > 0


def test_the_run_that_is_made_without_a_manifest_trains_on_the_text_that_is_given(tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("the cat sat on the mat. " * 20)
    assert init(tmp_path / "mine", "--data", str(text)) == 0
    run = load_run(tmp_path / "mine" / "run.toml")
    assert (run.data.source, run.data.tokens, run.pinned) == ("files", 480, True)


def test_the_peers_of_all_islands_have_a_line_and_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, islands = tmp_path / "b.toml", IslandsSpec(count=2, local_steps=2)
    manifest.write_text(replace(audit_run(stages=2, steps=3), islands=islands).to_toml())
    assert init(tmp_path / "mine", "--manifest", str(manifest)) == 0
    keys = [Identity.load(tmp_path / "mine" / f"peer{cell}.key").peer_id for cell in range(4)]
    assert set(load_run(tmp_path / "mine" / "run.toml").admission.founders) == set(keys)
    printed = capsys.readouterr().out
    assert all(f"--stage {cell} --identity {tmp_path}/mine/peer{cell}.key" in printed for cell in range(4))
    assert "swarm audit" not in printed, "none could compute what islands add"
    with pytest.raises(SetupError, match=r"cannot be audited: it names no trainers, has islands, .*verify"):
        check_audited(load_run(tmp_path / "mine" / "run.toml"))


@pytest.mark.parametrize("written", [2, 5, 6, 7])
def test_a_disk_that_is_full_before_the_run_is_made_is_not_in_the_way_of_the_next_try(
    written: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After so many files: keys, the manifest, and the charter last."""
    room = iter(range(written))

    def with_room(write: Any) -> Any:
        def writing(*given: Any) -> Any:
            if next(room, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*given)

        return writing

    mine, words = tmp_path / "mine", ("--manifest", str(unpinned(tmp_path)))
    mine.mkdir()
    (mine / "notes").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Identity, "to_file_bytes", with_room(Identity.to_file_bytes))
        patch.setattr(atomic_file, "write_whole", with_room(atomic_file.write_whole))
        patch.setattr("peers.programs.charter.write_charter", with_room(signed.write_charter))
        assert init(mine, *words) == (0 if written == 7 else 3)
    assert written == 7 or "the disk is full" in capsys.readouterr().err
    assert written == 7 or [path.name for path in mine.iterdir()] == ["notes"]
    assert init(mine, *words) == (3 if written == 7 else 0)


def test_what_init_cannot_do_is_said_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, files = unpinned(tmp_path), tmp_path / "files.toml"
    files.write_text(manifest.read_text().replace('"tales"', '"files"'))
    assert init(tmp_path / "mine", "--manifest", str(files)) != 0
    assert "--data" in capsys.readouterr().err
    files.unlink()
    assert main(["up", str(tmp_path / "mine")]) != 0
    assert f"mine holds no run: make one with {program()} init {tmp_path}/mine" in capsys.readouterr().err
    keepers = tmp_path / "keepers"
    keepers.mkdir()
    manifest.rename(keepers / "run.toml")
    assert main(["up", str(keepers)]) != 0, "it has a manifest, too"
    assert "keepers holds no run: it lacks charter, owner.key, trainer.key; take" in capsys.readouterr().err
    assert main(["up", __file__]) != 0
    assert f"{__file__} holds no run: it lacks run.toml, " in capsys.readouterr().err
    (keepers / "run.toml").rename(manifest)
    keepers.rmdir()
    assert init(manifest / "mine", "--manifest", str(manifest)) != 0
    assert "mine cannot be made: Not a directory. Name another folder" in capsys.readouterr().err
    assert init(tmp_path / "mé") != 0
    assert "mé: a run is called as its folder, so take another one. name = " in capsys.readouterr().err
    manifest.write_text(manifest.read_text().replace('owner = ""', f'owner = "{OWNER.peer_id}"'))
    assert init(tmp_path / "mine", "--manifest", str(manifest)) != 0
    assert "the manifest has an owner already (admission.owner): leave it out" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml"]


def test_an_invitation_is_of_the_owner_and_for_a_published_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    init(folder, "--manifest", str(unpinned(tmp_path)))
    run = load_run(folder / "run.toml")
    capsys.readouterr()

    def invite(manifest: Path, owner: Path, *more: str) -> int:
        return main(["invite", "--manifest", str(manifest), "--owner", str(owner), *more])

    assert invite(folder / "run.toml", folder / "owner.key", "--role", "keeper", "--uses", "3") == 0
    told = capsys.readouterr()
    role, certificate = signed.certify(told.out, run.id, KIM.peer_id)
    shown = signed.seal_credential(certificate)
    token = signed.open_credential(shown, run.id, run.admission.owner, KIM.peer_id).token
    assert role == "keeper"
    assert token is not None
    assert token.uses == 3
    assert f"swarm ban {token.id} @join.txt --owner {folder / 'owner.key'} --why" in told.err
    assert unix_s() + 6 * 86_400 < token.expires < unix_s() + 8 * 86_400
    assert invite(folder / "run.toml", folder / "trainer.key") != 0
    assert "trainer.key is not the key of the owner of 'mine'" in capsys.readouterr().err
    assert invite(tmp_path / "a.toml", folder / "owner.key") != 0
    assert "a.toml is not published yet: give the run.toml of swarm init" in capsys.readouterr().err
    assert invite(folder / "run.toml", folder / "none.key") != 0
    assert "none.key is no key: No such file" in capsys.readouterr().err


# --- at the run ---------------------------------------------------------------------------------------------

virtual = pytest.mark.virtual_time
RUN = replace(
    audit_run(stages=2, steps=3), data=replace(audit_run().data, sha256="0" * 64, sequence_length=8)
)
RUN = replace(RUN, admission=replace(RUN.admission, owner=OWNER.peer_id))
NAME = RunName(RUN.name, fingerprint_of(OWNER.peer_id))


def charter_of(sequence: int = 1, **changes: Any) -> Charter:
    fields = {"name": RUN.name, "run": RUN.id, "sequence": sequence, "expires": int(unix_s()) + 86_400}
    return rules.make(**(fields | changes))


@asynccontextmanager
async def a_run(
    monkeypatch: pytest.MonkeyPatch, *, charter: bool = True, run: Run = RUN
) -> AsyncIterator[list[MemoryNode]]:
    """Three peers of a run in one loop; a command's node is a fourth."""
    async with MemoryDht() as dht:
        first = await dht.add(1, run_id=run.id)
        first.directory._identity = OWNER
        await first.directory.publish_manifest(run)
        first.directory._identity = first.identity
        peers = [first, *[await dht.add(n, run_id=run.id, join=first) for n in (2, 3)]]
        for peer in peers[1:]:
            await peer.directory.fetch_manifest(run.id)
        if charter:
            await first.directory.charters.publish(charter_of(), OWNER)
        numbers = iter(range(50, 99))

        @asynccontextmanager
        async def node(*, run_id: str | None, **_: Any) -> AsyncIterator[Any]:
            mine = await dht.add(next(numbers), run_id=run_id, join=peers[1])
            try:
                yield SimpleNamespace(directory=mine.directory, run_id=run_id)
            finally:
                await dht.kill(mine)

        monkeypatch.setattr("peers.net.node.Node", node)
        yield peers


def given(kind: type, *, run: str = str(NAME), **more: Any) -> Any:
    return kind(run=run, join=("/ip4/127.0.0.1/tcp/1/p2p/x",), **more)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name, identity in (("owner", OWNER), ("kim", KIM)):
        identity.save(tmp_path / f"{name}.key")
    return tmp_path


@virtual
async def test_a_ban_is_published_and_lifted(
    monkeypatch: pytest.MonkeyPatch, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = keys / "owner.key"
    async with a_run(monkeypatch) as peers:
        await commands.run_ban(given(tool_options.BanOptions, peer=SAM.peer_id, why="lies", owner=owner))
        assert re.match(f"{SAM.peer_id} is banned. Charter 2 holds until 20", capsys.readouterr().out)
        await asyncio.sleep(30)
        terms = peers[2].directory.door.terms
        assert terms is not None
        assert terms.charter.bans == (Ban(SAM.peer_id, "lies"),)
        await commands.run_charter(given(tool_options.CharterOptions))
        assert f"1 ban:\n  {SAM.peer_id} lies" in capsys.readouterr().out
        with pytest.raises(SetupError, match="is banned already"):
            await commands.run_ban(given(tool_options.BanOptions, peer=SAM.peer_id, why="", owner=owner))
        with pytest.raises(SetupError, match=f"{OWNER.peer_id} owns the run.*swarm revoke"):
            await commands.run_ban(given(tool_options.BanOptions, peer=OWNER.peer_id, why="", owner=owner))
        by_id = given(tool_options.UnbanOptions, run=RUN.id, peer=SAM.peer_id, owner=owner)
        await commands.run_ban(by_id)
        assert "is not banned. Charter 3" in capsys.readouterr().out
        with pytest.raises(SetupError, match="is not banned"):
            await commands.run_ban(by_id)


@virtual
async def test_only_the_owner_says_who_takes_part(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    async with a_run(monkeypatch):
        for kind, more in (
            (tool_options.BanOptions, {"peer": SAM.peer_id, "why": ""}),
            (tool_options.UnbanOptions, {"peer": SAM.peer_id}),
            (tool_options.CharterOptions, {}),
        ):
            command = {"BanOptions": "ban", "UnbanOptions": "ban", "CharterOptions": "charter"}[kind.__name__]
            with pytest.raises(SetupError, match=rf"--owner is not the key of the owner of {NAME}: its fing"):
                await getattr(commands, f"run_{command}")(given(kind, owner=keys / "kim.key", **more))
        with pytest.raises(SetupError, match="only the owner changes a charter: give its key as --owner"):
            await commands.run_charter(given(tool_options.CharterOptions, peers="list"))


@virtual
async def test_a_charter_is_changed_and_shown(
    monkeypatch: pytest.MonkeyPatch, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with a_run(monkeypatch) as peers:
        peers[0].directory.charters._revoke(signed.Revocation(RUN.id, SAM.peer_id), 0.0)
        options = given(
            tool_options.CharterOptions, owner=keys / "owner.key", peers="list", name_peer=(KIM.peer_id,),
            founder=(SAM.peer_id,), trusted_stages=(-1, 0), work_bits=3, days=1.0,
        )  # fmt: skip
        await commands.run_charter(options)
        printed = capsys.readouterr().out
        assert f"peers: list\n  {KIM.peer_id}\ntrainers: list\nkeepers: open with 3 bits of work\n" in printed
        assert f"founders:\n  {SAM.peer_id}\n" in printed
        assert "trusted stages: -1, 0" in printed
        await commands.run_charter(
            given(tool_options.CharterOptions, owner=keys / "owner.key", unname=(KIM.peer_id, SAM.peer_id))
        )
        assert "peers: list\ntrainers" in capsys.readouterr().out
        words = ["charter", "--run", str(NAME), "--join", "/ip4/127.0.0.1/tcp/1/p2p/x"]
        for more, kept in ((["--work-bits", "0"], True), (["--trusted-stages"], False)):
            typed = build_parser().parse_args([*words, "--owner", str(keys / "owner.key"), *more])
            await commands.run_charter(options_from(tool_options.CharterOptions, typed))
            assert ("trusted stages: -1, 0" in capsys.readouterr().out) == kept
        for number in (2, -3):
            no_such = given(tool_options.CharterOptions, owner=keys / "owner.key", trusted_stages=(0, number))
            with pytest.raises(SetupError, match=f"--trusted-stages {number}: run 'counting' has stages 0 "):
                await commands.run_charter(no_such)


@virtual
@pytest.mark.parametrize("more", [{"trainers": "open"}, {"name_trainer": (KIM.peer_id,)}])
async def test_a_charter_does_not_seem_to_add_trainers_to_those_that_the_manifest_names(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of every run that `swarm init` makes: `trainers: open` was shown, and nobody was admitted by it."""
    run = replace(RUN, admission=replace(RUN.admission, trainers=(SAM.peer_id,)))
    async with a_run(monkeypatch, charter=False, run=run) as peers:
        await peers[0].directory.charters.publish(charter_of(run=run.id), OWNER)
        with pytest.raises(SetupError, match="change nothing: the manifest of 'counting' names its trainers"):
            await commands.run_charter(given(tool_options.CharterOptions, owner=keys / "owner.key", **more))
    assert capsys.readouterr().out == ""


@virtual
async def test_a_key_is_revoked_by_itself_and_the_owner_makes_it_last(
    monkeypatch: pytest.MonkeyPatch, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with a_run(monkeypatch) as peers:
        await commands.run_revoke(given(tool_options.RevokeOptions, identity=keys / "kim.key"))
        assert f"{KIM.peer_id} is revoked: peers that are there now refuse it" in capsys.readouterr().out
        await asyncio.sleep(30)
        assert "revoked by itself" in peers[1].directory.door.refusal(KIM.peer_id, "status", True)
        await commands.run_charter(given(tool_options.CharterOptions, owner=keys / "owner.key"))
        assert f"revoked keys:\n  {KIM.peer_id}" in capsys.readouterr().out


@virtual
async def test_strangers_that_revoke_themselves_neither_fill_a_charter_nor_keep_a_stolen_key_out_of_it(
    monkeypatch: pytest.MonkeyPatch, keys: Path
) -> None:
    """Sixty-four keys of small ids before each charter: at the fifth the owner could ban nobody any more."""
    owner = keys / "owner.key"
    crowd = sorted(Identity(n.to_bytes(32, "big")).peer_id for n in range(400))
    stolen = max(crowd)
    async with a_run(monkeypatch) as peers:
        named = given(tool_options.CharterOptions, owner=owner, name_trainer=(stolen,))
        await commands.run_charter(named)
        for renewed in range(5):
            seen = frozenset({stolen, *crowd[64 * renewed : 64 * (renewed + 1)]})
            monkeypatch.setattr(CharterKeeper, "revoked", seen)
            await commands.run_charter(given(tool_options.CharterOptions, owner=owner))
        await asyncio.sleep(30)
        charter = peers[0].directory.charters.charter
        assert charter is not None and stolen in charter.revocations
        assert len(charter.revocations) <= rules.MAX_REVOCATIONS_TAKEN + 1
        await commands.run_ban(given(tool_options.BanOptions, peer=SAM.peer_id, why="x" * 100, owner=owner))


def test_what_an_owner_wrote_says_nothing_to_a_terminal() -> None:
    """Anybody may read the charter of a run that somebody else made."""
    why = "lies\x1b[2J\u202e\nrun of somebody else"
    charter = msgspec.structs.replace(charter_of(), bans=(Ban(SAM.peer_id, why),))
    assert rules.decode(rules.encode(charter)) == charter, "it may say that"
    last = commands.told(charter, OWNER.peer_id).splitlines()[-1]
    assert last.startswith(f"  {SAM.peer_id} lies?[2J??run") and last.isprintable()


@virtual
async def test_a_run_without_a_charter_has_no_bans(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    async with a_run(monkeypatch, charter=False):
        with pytest.raises(SetupError, match=f"the run {RUN.id} has no charter: one that swarm init"):
            await commands.run_charter(given(tool_options.CharterOptions, run=RUN.id))


@virtual
async def test_what_no_node_takes_is_said(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    async with a_run(monkeypatch) as peers:
        for peer in peers:
            monkeypatch.setattr(peer.node, "_store", lambda *_: False)
        ban = given(tool_options.BanOptions, peer=SAM.peer_id, why="", owner=keys / "owner.key")
        with pytest.raises(SetupError, match="no node of the run took the new charter: try again"):
            await commands.run_ban(ban)
        with pytest.raises(SetupError, match="no node of the run took the revocation: try again"):
            await commands.run_revoke(given(tool_options.RevokeOptions, identity=keys / "kim.key"))


@virtual
async def test_two_charters_of_one_moment_are_noticed(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    plain = CharterKeeper.publish

    async def meanwhile(self: CharterKeeper, charter: Charter, owner: Identity) -> int:
        took = await plain(self, charter, owner)
        others = (charter_of(2, work_bits=bits) for bits in range(40))
        higher = next(one for one in others if one.rank > charter.rank)
        assert self.adopt(higher, OWNER.peer_id, signed.seal_charter(higher, OWNER))
        return took

    async with a_run(monkeypatch):
        monkeypatch.setattr(CharterKeeper, "publish", meanwhile)
        ban = given(tool_options.BanOptions, peer=SAM.peer_id, why="", owner=keys / "owner.key")
        with pytest.raises(SetupError, match="another charter was signed in the same moment, and holds"):
            await commands.run_ban(ban)


# --- a bootstrap with a charter -----------------------------------------------------------------------------


def bootstrap(folder: Path, said: list[Event]) -> Bootstrap:
    options = BootstrapOptions(manifest=folder / "run.toml", identity=folder / "owner.key")
    return Bootstrap(options, emit=said.append)


async def at_once(call: Any, *arguments: Any) -> Any:
    """In place of `asyncio.to_thread`: virtual time does not wait for a thread."""
    return call(*arguments)


def node_of(memory: MemoryNode) -> Any:
    return SimpleNamespace(directory=memory.directory, door=memory.directory.door, run_id=RUN.id)


@virtual
async def test_a_bootstrap_publishes_a_charter_and_writes_newer_ones_to_its_file(keys: Path) -> None:
    said: list[Event] = []
    path = keys / "charter"
    signed.write_charter(
        path, OWNER.peer_id, signed.seal_charter(charter_of(expires=int(unix_s()) + 25 * 86_400), OWNER)
    )
    async with MemoryDht() as dht:
        memory = await dht.add(1, run_id=RUN.id)
        await bootstrap(keys, said)._publish_charter(node_of(memory), RUN, path)
        assert not said
        await memory.directory.charters.publish(charter_of(4), OWNER)
        assert signed.read_charter(path)[0].sequence == 4


@virtual
async def test_a_bootstrap_with_the_owners_key_renews_a_charter_that_is_about_to_expire(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not as soon as it is up, unless nobody is admitted: it may not have heard of the owner's next one
    yet, and its own would have the same sequence, without the ban that is new in that."""

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    said: list[Event] = []
    path = keys / "charter"
    banned = charter_of(bans=(Ban(SAM.peer_id, "x"),))
    signed.write_charter(path, OWNER.peer_id, signed.seal_charter(banned, OWNER))
    async with MemoryDht() as dht:
        memory = await dht.add(1, run_id=RUN.id)
        again = bootstrap(keys, said)
        await again._publish_charter(node_of(memory), RUN, path)
        assert not said and signed.read_charter(path)[0] == banned
        await again._renew(node_of(memory))
        assert said == [Note(text="the charter was renewed: it is 2 now")]
        renewed = signed.read_charter(path)[0]
        assert (renewed.sequence, renewed.bans) == (2, banned.bans)
        assert renewed.expires > unix_s() + 29 * 86_400


@virtual
async def test_a_bootstrap_whose_key_was_put_away_meanwhile_renews_the_charter_all_the_same(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner keeps it where nobody finds it: ten days before the charter's end the bootstrap ended."""
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    path, said = keys / "charter", list[Event]()
    signed.write_charter(path, OWNER.peer_id, signed.seal_charter(charter_of(), OWNER))
    async with MemoryDht() as dht:
        memory = await dht.add(1, run_id=RUN.id)
        one = bootstrap(keys, said)
        await one._publish_charter(node_of(memory), RUN, path)
        (keys / "owner.key").rename(keys / "away.key")
        await one._renew(node_of(memory))
    assert said == [Note(text="the charter was renewed: it is 2 now")]


@pytest.mark.parametrize("options", [tool_options.InitOptions, tool_options.CharterOptions])
def test_who_shortens_a_charter_is_told_that_a_bootstrap_renews_it(options: Any) -> None:
    """`swarm init --days 5` held for thirty days, from the bootstrap's first minute on."""
    (told,) = [one.metadata["help"] for one in fields(options) if one.name == "days"]
    assert f"bootstrap with the owner's key renews it {RENEWED_S / 86_400:g} days before" in told


@virtual
@pytest.mark.parametrize("days", [-1, 31], ids=["expired", "too far ahead"])
async def test_a_charter_that_nobody_takes_is_renewed_as_soon_as_its_owners_bootstrap_is_up(
    keys: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """It was long ago, or signed by a clock that was wrong: no newcomer found the run, and none was told."""

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    path = keys / "charter"
    old = charter_of(expires=int(unix_s()) + days * 86_400)
    signed.write_charter(path, OWNER.peer_id, signed.seal_charter(old, OWNER))
    async with MemoryDht() as dht:
        memory = await dht.add(1, run_id=RUN.id)
        await bootstrap(keys, [])._publish_charter(node_of(memory), RUN, path)
    assert unix_s() + 29 * 86_400 < signed.read_charter(path)[0].expires <= unix_s() + 30 * 86_400


@virtual
async def test_a_bootstrap_whose_charter_has_expired_asks_for_a_newer_one_before_it_signs(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own would have the sequence of the owner's next one, and perhaps hold: without the ban in that."""
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    path, newer = keys / "charter", charter_of(2, bans=(Ban(SAM.peer_id, "x"),))
    old = charter_of(expires=int(unix_s()) - 86_400)
    signed.write_charter(path, OWNER.peer_id, signed.seal_charter(old, OWNER))
    async with a_run(monkeypatch, charter=False) as peers:
        await peers[2].directory.charters.publish(newer, OWNER)
        await bootstrap(keys, [])._publish_charter(node_of(peers[0]), RUN, path)
    assert signed.read_charter(path)[0] == newer


@virtual
async def test_a_bootstrap_that_knows_of_no_charter_says_who_is_admitted_and_forgets_none(keys: Path) -> None:
    """As docs/public-run.md has it started again from a keeper's folder."""
    said: list[Event] = []
    async with MemoryDht() as dht:
        memory = await dht.add(1, run_id=RUN.id)
        await bootstrap(keys, said)._publish_charter(node_of(memory), RUN, None)
        assert said == [Note(text="without --charter every peer that has the manifest's id is admitted")]
        for made in (charter_of(run="ab" * 16), charter_of()):  # of another run of this owner; of this one
            signed.write_charter(keys / "charter", OWNER.peer_id, signed.seal_charter(made, OWNER))
            mine = made.run == RUN.id
            text = f"{keys / 'charter'} lies beside the key: give it as --charter"
            with pytest.raises(SetupError, match=text) if mine else contextlib.nullcontext():
                await bootstrap(keys, said)._publish_charter(node_of(memory), RUN, None)


@virtual
async def test_a_file_that_is_no_charter_of_the_run_is_not_published(keys: Path) -> None:
    path = keys / "charter"
    async with MemoryDht() as dht:
        memory = await dht.add(1, run_id=RUN.id)
        revocation = signed.seal_revocation(RUN.id, OWNER)
        for data, why in ((b"x", "a malformed charter"), (b"\xff\n", "a malformed charter"),
                          (OWNER.peer_id.encode() + b"\n" + revocation, "it is a revocation")):  # fmt: skip
            path.write_bytes(data)
            with pytest.raises(SetupError, match=f"--charter {path} is none that swarm init made: {why}"):
                await bootstrap(keys, [])._publish_charter(node_of(memory), RUN, path)
        other = charter_of(run="ab" * 16)
        signed.write_charter(path, OWNER.peer_id, signed.seal_charter(other, OWNER))
        changed = "A manifest that was changed since is another run: swarm init NAME"
        with pytest.raises(SetupError, match=changed):
            await bootstrap(keys, [])._publish_charter(node_of(memory), RUN, path)


# --- being admitted -----------------------------------------------------------------------------------------


class FakeNode:
    """What `entry` needs of a node."""

    def __init__(self, who: Identity, **changes: Any) -> None:
        self.peer_id, self.door = who.peer_id, Doorkeeper()
        self.ended: list[str] = []
        if changes.pop("has_charter", True):
            self.go_by(**changes)

    def go_by(self, **changes: Any) -> None:
        self.door.set(AdmissionTerms(charter_of(**changes), OWNER.peer_id, stages=2))

    def end(self, why: SetupError) -> None:
        self.ended.append(why.text)


async def enter(
    node: FakeNode,
    role: rules.Role = "peer",
    token: str | None = None,
    cache: Path = Path("/dev/null/stamps"),
) -> list[str]:
    """What was noted."""
    notes: list[str] = []
    await entry.enter(node, role, token, cache, notes.append)  # type: ignore[arg-type]
    return notes


async def test_a_token_admits_and_is_shown_to_all() -> None:
    token = signed.make_token(RUN.id, OWNER, "peer", expires=int(unix_s()) + 100)
    node = FakeNode(KIM, peers=AdmissionRule("token"))
    await enter(node, token=token)
    opened = signed.open_credential(node.door.credential, RUN.id, OWNER.peer_id, KIM.peer_id)
    assert opened.token is not None
    with pytest.raises(SetupError, match="--token is for a peer, and this is a keeper: ask for another one"):
        await enter(FakeNode(KIM), "keeper", token)
    with pytest.raises(SetupError, match="--token: this run has no charter and admits everybody"):
        await enter(FakeNode(KIM, has_charter=False), token=token)
    with pytest.raises(SetupError, match=rf"does not admit this peer \({KIM.peer_id}\): .*has no token"):
        await enter(FakeNode(KIM, peers=AdmissionRule("token")))


async def test_a_program_is_admitted_whatever_others_show() -> None:
    """Each new charter ended it, where so many came after it that the first are forgotten."""
    node, until = FakeNode(KIM, has_charter=False), int(unix_s()) + 100
    node.door = Doorkeeper(most_shown=1)
    node.go_by(peers=AdmissionRule("token"))
    await enter(node, token=signed.make_token(RUN.id, OWNER, "peer", expires=until))
    _, other = signed.certify(signed.make_token(RUN.id, OWNER, "peer", expires=until), RUN.id, SAM.peer_id)
    node.door.show(SAM.peer_id, signed.seal_credential(other))
    node.go_by(sequence=2, peers=AdmissionRule("token"))
    assert not node.ended


async def test_a_program_ends_when_its_peer_is_banned() -> None:
    node = FakeNode(KIM)
    await enter(node)
    node.go_by(sequence=2, bans=(Ban(SAM.peer_id, "x"),))
    assert not node.ended
    node.go_by(sequence=3, bans=(Ban(KIM.peer_id, "lies"),))
    assert node.ended == [
        f"the run does not admit this peer ({KIM.peer_id}): the owner of the run banned it: lies"
    ]


async def test_a_program_ends_when_its_run_gets_a_charter_that_does_not_admit_it() -> None:
    node = FakeNode(KIM, has_charter=False)
    await enter(node)
    node.go_by(peers=AdmissionRule("list"))
    assert "the run's charter names its peers, and this is none of them: ask the owner" in node.ended[0]


async def test_a_stamp_is_made_once(tmp_path: Path) -> None:
    for noted in (1, 1):
        node = FakeNode(KIM, work_bits=14)
        notes = await enter(node, cache=tmp_path / "stamps")
        assert len(notes) == noted
        assert notes[0].startswith("the run asks for a stamp of 14 bits of work: about 0 s of a core, once")
        opened = signed.open_credential(node.door.credential, RUN.id, OWNER.peer_id, KIM.peer_id)
        assert opened.stamp_bits >= 14
    (path,) = (tmp_path / "stamps").iterdir()
    path.write_text("no number")
    await enter(FakeNode(KIM, work_bits=14), cache=tmp_path / "stamps")
    assert path.read_text().isdigit()


async def test_a_stamp_is_looked_for_until_there_is_one() -> None:
    node = FakeNode(Identity(bytes([59]) * 32), work_bits=17)
    assert signed.find_stamp(RUN.id, node.peer_id, 17) is None  # of those that are tried at once
    await enter(node)
    assert not node.door.why_not(node.peer_id, "peer", now=unix_s(), carried=node.door.credential)


def test_no_thread_goes_on_making_a_stamp_that_was_given_up(tmp_path: Path) -> None:
    """A loop waits for its threads: an interrupted program ended when the stamp was there, or never."""

    async def interrupted() -> None:
        entering = asyncio.ensure_future(enter(FakeNode(SAM, work_bits=20), cache=tmp_path / "stamps"))
        await asyncio.sleep(0)
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)

    asyncio.run(interrupted())
    assert not (tmp_path / "stamps").exists()


async def test_a_program_that_is_asked_for_a_stamp_while_it_serves_says_what_to_do(tmp_path: Path) -> None:
    await enter(node := FakeNode(KIM), "keeper")
    node.go_by(sequence=2, work_bits=14)
    assert len(node.ended) == 1 and node.ended[0].endswith("14 bits of work, and this has 0: start it again")
    await enter(FakeNode(KIM, work_bits=14), "keeper", cache=tmp_path / "stamps")


def test_a_peer_serves_stages_that_it_is_trusted_with() -> None:
    stranger, named = (
        FakeNode(KIM, trusted_stages=(0,)),
        FakeNode(KIM, trusted_stages=(0,), founders=(KIM.peer_id,)),
    )
    assert entry.allowed_stages(stranger, range(2)) == [1]  # type: ignore[arg-type]
    assert entry.allowed_stages(named, range(2)) == [0, 1]  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="stage 0 is served only by peers that the owner named or invited"):
        entry.allowed_stages(stranger, [0])  # type: ignore[arg-type]


@virtual
async def test_a_newcomer_takes_a_stage_that_it_may() -> None:
    class Directory:
        async def announce(self, record: PeerRecord) -> None:
            announced.append(record.stage)

        async def lookup_all(self) -> list[PeerRecord]:
            return []

    announced: list[int] = []
    assert await choose_stage(KIM.peer_id, RUN, Directory(), (), "", [1]) == 1  # type: ignore[arg-type]
    assert announced == [-1, 1]


def test_what_up_cannot_start_is_said_before_how_to_watch_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path / "mine", "--manifest", str(unpinned(tmp_path))) == 0
    capsys.readouterr()
    for named in ("mine", "mine/run.toml"):  # the file in the folder is taken for the folder
        assert main(["up", str(tmp_path / named), "--device", "gpu9"]) != 0
        said = capsys.readouterr()
        assert "--device 'gpu9' is unknown; take auto" in said.err and "watch it" not in said.out
