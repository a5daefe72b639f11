"""Everything that knows DeepSpeed: its JSON, its workarounds, NVMe, optimizer state by parameter."""
