-- Leaky bucket; the twin of src/limit/strategy/leaky_bucket.rs, which explains it. The level of the meter is that of the
-- bucket. Uses meter of meter.lua.

return meter()
