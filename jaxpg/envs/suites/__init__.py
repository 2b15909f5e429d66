"""Environments of other libraries by name, "brax:ant": one adapter per library, imported only when asked for."""

from jaxpg.envs.suites.table import (
    ABSENT,
    SUITES,
    Suite,
    default_settings,
    ids,
    install_command,
    is_installed,
    is_suite_name,
    make,
)

__all__ = [
    "ABSENT",
    "SUITES",
    "Suite",
    "default_settings",
    "ids",
    "install_command",
    "is_installed",
    "is_suite_name",
    "make",
]
