"""Bytes of memory that tensors hold: `lightning_par.planner.memory.live_bytes`, of real tensors."""

from __future__ import annotations

from lightning_par.planner.memory.live_bytes import LiveBytes as LiveBytes
