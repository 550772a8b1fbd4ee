# SPDX-License-Identifier: Apache-2.0
"""Examples of hypothesis are not judged by their time, which depends on what else is running."""

from hypothesis import HealthCheck, settings

settings.register_profile('loaded', deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile('loaded')
