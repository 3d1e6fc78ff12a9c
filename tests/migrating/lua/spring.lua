-- A bucket of tokens that is refilled at each request: Spring Cloud Gateway's RedisRateLimiter. Its keys live for as many whole
-- seconds as it takes to fill the bucket twice; if that is less than one, nothing is kept.
--
-- ARGV: now in microseconds, the cost, tokens per second, the most, and the unit of its clock in microseconds.

local now, cost, rate, most, unit = unpack(ARGV)
now = math.floor(now / unit) * unit / 1000000
local tokens = tonumber(redis.call('GET', KEYS[1] .. '.tokens') or most)
local refilled = tonumber(redis.call('GET', KEYS[1] .. '.timestamp') or 0)
tokens = math.min(most, tokens + math.max(0, now - refilled) * rate)
local allowed = tokens >= tonumber(cost)
if allowed then
  tokens = tokens - cost
end
if math.floor(most / rate * 2) > 0 then
  redis.call('MSET', KEYS[1] .. '.tokens', tokens, KEYS[1] .. '.timestamp', now)
end
return allowed and 1 or 0
