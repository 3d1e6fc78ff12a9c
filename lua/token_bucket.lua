-- Token bucket. The Rust half, src/limit/strategy/token_bucket.rs, explains the algorithm. The level of the meter is
-- the number of missing tokens. Uses meter of meter.lua.

return meter()
