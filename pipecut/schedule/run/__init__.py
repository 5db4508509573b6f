"""The running half of schedules: one executor, over transports between ranks or inside one process."""
