"""The engine: it schedules requests on the host, between launches (runs of many rounds) of the device program."""
