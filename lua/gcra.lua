-- GCRA. The Rust half, src/limit/strategy/gcra.rs, explains the algorithm. The level of the meter is the backlog: how
-- far the theoretical arrival time lies in the future. Uses meter of meter.lua.

return meter()
