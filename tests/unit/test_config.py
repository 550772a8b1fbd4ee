# SPDX-License-Identifier: Apache-2.0
"""Settings and their rules; those of a file of a site, of a job, and of flags."""

import argparse
import dataclasses
import pydoc
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron.moevement import TrainingPlan
from megatron.moevement.arguments import add_arguments, config_from_args
from moevement_ext.config import ConfigurationError, SparseCheckpointConfig, node_name
from moevement_ext.config_file import CONFIG_FLAG, SITE, from_files, sources, value_of
from moevement_ext.launch.launch_config import LaunchConfig, store_address, unnamed_run_id
from tests.support.messages import messages
from tools.plan.flags import parse_megatron_flags


@pytest.mark.parametrize(('field', 'value', 'rule'), messages('config'))
def test_a_broken_rule_names_flag_value_and_rule(field: str, value: Any, rule: str) -> None:
    flag = '--sparse-ckpt-' + field.replace('_', '-')
    shown = f'{value:g}' if isinstance(value, int | float) else repr(value)
    with pytest.raises(ConfigurationError, match=f'{flag} {re.escape(shown)} must be {rule}'):
        SparseCheckpointConfig(**{field: value})


@pytest.mark.parametrize('settings', [SparseCheckpointConfig, TrainingPlan])
def test_unknown_field_is_refused_with_the_nearest_name(settings: Any) -> None:
    first, *_ = (field.name for field in dataclasses.fields(settings))
    said = rf"{settings.__name__} has no field '{first}s'; did you mean {first}\?"
    with pytest.raises(ConfigurationError, match=said):
        settings(**{f'{first}s': 1})
    with pytest.raises(ConfigurationError, match=f"no field 'zzz': it has {first}, "):
        settings(zzz=1)


@pytest.mark.parametrize('settings', [SparseCheckpointConfig, TrainingPlan])
def test_help_shows_the_text_of_each_field(settings: Any) -> None:
    shown = ' '.join(pydoc.plain(pydoc.render_doc(settings)).replace('|', ' ').split())
    texts = [(f.name, f.metadata.get('help')) for f in dataclasses.fields(settings)]
    assert all(text is None or f'{name}: {text}' in shown for name, text in texts)


def test_replication_has_these_rate_limits() -> None:
    rates = {'auto': None, 'off': None, 0: None, 0.02: 2e7, 10: 1e10}
    for given, bytes_per_s in rates.items():
        config = SparseCheckpointConfig(network_gb_per_s=given)
        assert config.network_bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ('given', 'host'),
    [
        ('login1:29400', 'login1'),
        ('10.0.0.5:29400', '10.0.0.5'),
        ('[fd00::5]:29400', 'fd00::5'),
        ('fd00::5:29400', 'fd00::5'),
    ],
)
def test_a_store_is_a_host_and_a_port(given: str, host: str) -> None:
    assert SparseCheckpointConfig(store=given).store_address == (host, 29400)


def test_node_name_can_be_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MOEVEMENT_NODE', 'node-b')
    assert node_name() == 'node-b'
    monkeypatch.setenv('MOEVEMENT_NODE', '')
    assert node_name() == socket.gethostname()


DISK = {'strategy': 'checkfreq', 'disk': '/disk'}


@pytest.mark.parametrize(
    ('given', 'settled'),
    [
        ({}, ('localized', 'auto', 2, 100)),
        ({'strategy': 'gemini'}, ('global', 1, 2, 100)),
        ({'strategy': 'moc', 'experts': 'dynamic'}, ('global', 1, 2, 100)),
        ({'strategy': 'gemini', 'recovery': 'whole-job'}, ('whole-job', 1, 2, 100)),
        (DISK, ('global', 1, 0, 1)),
    ],
)
def test_strategy_fills_in_missing_values(given: dict[str, Any], settled: Any) -> None:
    config = SparseCheckpointConfig(**given)
    assert (config.recovery, config.window, config.replicas, config.disk_every) == settled
    assert dataclasses.replace(config) == config, 'what is settled may be given'


@pytest.mark.parametrize(('given', 'said'), messages('strategies'))
def test_a_flag_without_use_for_the_strategy_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        SparseCheckpointConfig(**given)
    assert '\n' not in str(refused.value)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a job at a site, both with a file."""
    (tmp_path / 'site.toml').write_text('disk_every = 7\nreplicas = 0\ninterface = "ib0"\nmtbf = 9')
    (tmp_path / 'job.toml').write_text(
        'disk_every = 8\nwindow = 4\nelastic = "restart"\nmtbf = 9.5'
    )
    monkeypatch.setenv(SITE, str(tmp_path / 'site.toml'))
    return [CONFIG_FLAG, str(tmp_path / 'job.toml'), '--sparse-ckpt-window', 'auto']


@pytest.mark.parametrize('first', [True, False])
def test_flags_win_over_the_job_over_the_site(
    job: list[str], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = job if first else [*job[2:], f'{CONFIG_FLAG}={job[1]}']
    parser = add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(
        [*flags, '--sparse-ckpt-strategy', 'gemini', '--sparse-ckpt-interval', 'daly']
    )
    config = config_from_args(args)
    assert (config.window, config.disk_every, config.replicas) == (1, 8, 0)
    assert (config.interface, config.elastic, config.mtbf) == ('ib0', 'restart', 9.5)
    monkeypatch.delenv(SITE)
    assert config_from_args(parser.parse_args([])).disk_every == 100  # nothing stays of a parse
    monkeypatch.setattr('sys.argv', ['program', *flags])
    assert parser.parse_args().sparse_ckpt_disk_every == 8


def test_every_setting_has_its_source(job: list[str]) -> None:
    site, own = (
        f'{job[1].replace("job", name)} ({by})'
        for name, by in (('site', SITE), ('job', CONFIG_FLAG))
    )
    assert sources(job) == {
        'disk_every': own, 'replicas': site, 'interface': site, 'mtbf': own, 'window': 'a flag',
        'elastic': own,
    }  # fmt: skip
    assert value_of(job, '--sparse-ckpt-window') == 'auto'
    assert value_of(job, '--sparse-ckpt-disk-every') == '8'
    assert value_of(job, '--sparse-ckpt-store') is None


def test_launchers_and_plans_read_the_files(
    job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guests = LaunchConfig('p', tuple(job), nodes=3, when_no_spare='layout')
    assert guests.sizes == {1, 2, 3}
    assert parse_megatron_flags(job).fields('protection') == {'window': 'auto', 'replicas': 0}
    monkeypatch.setenv('SLURM_JOB_ID', '5')
    assert unnamed_run_id(job) == 'slurm-5' and store_address(job) is None
    (tmp_path / 'site.toml').write_text('run_id = "r"\nstore = "h:1"\nelastic_exact = true')
    assert unnamed_run_id(job) is None and store_address(job) == ('h', 1)
    with pytest.raises(ConfigurationError, match='reads no windows of other layouts'):
        LaunchConfig('p', tuple(job), nodes=3, when_no_spare='layout')


@pytest.mark.parametrize(
    ('text', 'message'),
    [*messages('config-file'), (None, 'No such file or directory; give a TOML file.')],
)
def test_a_wrong_file_is_named_with_its_key(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / 'wrong.toml'
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        from_files([CONFIG_FLAG, str(file)])
    assert str(refused.value) == f'{CONFIG_FLAG} {file}: {message}'
    parser = add_arguments(argparse.ArgumentParser(prog='program'))
    with pytest.raises(SystemExit):
        parser.parse_args([CONFIG_FLAG, str(file)])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f'program: error: {refused.value}')


def test_plain_megatron_reads_no_file_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SITE, '/missing.toml')
    parser = add_arguments(argparse.ArgumentParser())
    assert not parser.parse_args([]).sparse_ckpt
    with pytest.raises(SystemExit):
        parser.parse_args(['--sparse-ckpt'])
