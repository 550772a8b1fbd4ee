# SPDX-License-Identifier: Apache-2.0
import dataclasses
import pydoc
import re
import socket
from typing import Any

import pytest

from megatron.moevement import TrainingPlan
from moevement_ext.config import ConfigurationError, SparseCheckpointConfig, node_name

NAN = float('nan')


@pytest.mark.parametrize(
    ('field', 'value', 'rule'),
    [
        ('window', 'long', 'a whole number or "auto"'),
        ('window', 0, 'at least 1'),
        ('window', 20_000, 'at most 10000'),
        ('log_lag', -1, 'a number of iterations, 0 or more'),
        ('replicas', -1, 'at least 0'),
        ('host_memory_gb', 0, 'above 0'),
        ('host_memory_gb', NAN, 'above 0'),
        ('hang_timeout', 1.5, 'at least 2'),
        ('hang_timeout', NAN, 'at least 2'),
        ('stuck_timeout', 59, r'0 \(never\) or at least --sparse-ckpt-hang-timeout \(60\)'),
        ('stuck_timeout', NAN, r'0 \(never\) or at least'),
        ('recovery', 'all', 'auto, localized, global or whole-job'),
        ('recovery', '', 'auto, localized, global or whole-job'),
        ('order', 'random', 'popularity, soft, decayed, capacity or fixed'),
        ('dir', 'relative/path', 'an absolute path'),
        ('disk', 'relative/path', 'an absolute path'),
        ('run_id', 'exp.20240101', 'without a dot and 8 hexadecimal digits at its end'),
        ('store', 'host', 'HOST:PORT, where'),
        ('store', 'host:70000', 'HOST:PORT, where'),
        ('store', '[]:29400', 'HOST:PORT, where'),
        ('disk_every', 0, 'at least 1'),
        ('disk_gb_per_s', 0, 'above 0'),
        ('disk_gb_per_s', NAN, 'above 0'),
        ('network_gb_per_s', 0.019, 'auto, off, or a number of at least 0.02'),
        ('network_gb_per_s', -1, 'auto, off, or a number of at least 0.02'),
        ('network_gb_per_s', NAN, 'auto, off, or a number of at least 0.02'),
        ('network_gb_per_s', 'half', 'auto, off, or a number of at least 0.02'),
    ],
)
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
RULE = {'strategy': 'gemini', 'interval': 'daly', 'mtbf': 600.0}


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


@pytest.mark.parametrize(
    ('given', 'said'),
    [
        (
            {'strategy': 'copy'},
            "strategy 'copy' must be moevement, gemini, checkfreq, moc or moetion",
        ),
        ({**DISK, 'window': 4}, 'window 4 has no use with --sparse-ckpt-strategy checkfreq'),
        ({**DISK, 'replicas': 1}, 'replicas 1 has no use with --sparse-ckpt-strategy checkfreq'),
        ({**DISK, 'disk_every': 7}, 'disk-every 7 has no use'),
        ({'strategy': 'gemini', 'order': 'soft'}, 'order soft has no use'),
        ({'interval': 5}, 'interval 5 has no use with --sparse-ckpt-strategy moevement'),
        ({'strategy': 'gemini', 'recovery': 'localized'}, 'must be global or whole-job'),
        ({'strategy': 'checkfreq'}, 'disk must be given with --sparse-ckpt-strategy checkfreq'),
        ({**RULE, 'mtbf': None}, 'mtbf must be given with --sparse-ckpt-interval young'),
        ({**RULE, 'interval': 5}, 'mtbf must be given with --sparse-ckpt-interval young'),
        ({**RULE, 'mtbf': NAN}, 'mtbf nan must be a number of seconds above 0'),
        ({'strategy': 'gemini', 'interval': 0}, 'interval 0 must be at least 1'),
        ({**DISK, 'interval': 'daly'}, "interval 'daly' must be a whole number or auto"),
        ({'strategy': 'gemini', 'experts': 2}, 'experts 2 has no use with --sparse-ckpt-strategy'),
        ({'strategy': 'moc', 'elastic': 'restart'}, 'elastic restart has no use'),
        ({'strategy': 'moetion', 'interval': 5}, 'interval 5 has no use'),
        ({'strategy': 'moetion', 'experts': 2}, 'experts 2 has no use'),
        ({'strategy': 'moc', 'experts': 0}, 'experts 0 must be at least 1'),
        ({'strategy': 'moc', 'experts': 'all'}, "experts 'all' must be a whole number or dynamic"),
        ({'strategy': 'moc', 'verify': 'stop'}, 'verify stop must be report or off .* would stop'),
    ],
)
def test_a_flag_without_use_for_the_strategy_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        SparseCheckpointConfig(**given)
    assert '\n' not in str(refused.value)
