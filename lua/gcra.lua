-- GCRA; the twin of src/limit/strategy/gcra.rs, which explains it. The level of the meter is the backlog: how far the
-- theoretical arrival time is ahead of now. Uses meter of meter.lua.

return meter()
