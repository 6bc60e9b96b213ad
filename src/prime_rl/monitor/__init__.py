"""How a run is seen: log lines, metrics, and what each process is doing right now."""

from prime_rl.monitor.monitor import Monitor, read_metrics
from prime_rl.monitor.status import Status, read_status
from prime_rl.monitor.trackers import Extras

__all__ = ["Extras", "Monitor", "Status", "read_metrics", "read_status"]
