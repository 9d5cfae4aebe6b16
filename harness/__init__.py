"""Measurement: prompts, workloads, receipts."""
