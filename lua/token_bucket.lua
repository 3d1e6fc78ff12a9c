-- Token bucket; the twin of src/limit/strategy/token_bucket.rs, which explains it. The level of the meter is what the bucket
-- lacks. Uses meter of meter.lua.

return meter()
