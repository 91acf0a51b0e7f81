"""The one name that an SGLang engine imports: `caketin.sglang.CaketinStorage`."""

from __future__ import annotations

from dataplane.engines.sglang import CaketinStorage

__all__ = ["CaketinStorage"]
