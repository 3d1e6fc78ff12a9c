-- A log of permits, and the number of free ones: Redisson's RRateLimiter.
--
-- ARGV: now in microseconds, the cost, how many per interval, the interval in milliseconds.

local now, cost, rate, interval = math.floor(ARGV[1] / 1000), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local value, permits = KEYS[1] .. ':value', KEYS[1] .. ':permits'

-- A member is the number of the charge, which makes it unique, and how many permits it took.
local function sum(members)
  local total = 0
  for _, member in ipairs(members) do
    total = total + member:match(':(%d+)')
  end
  return total
end

local left = tonumber(redis.call('GET', value) or rate)
local released = sum(redis.call('ZRANGEBYSCORE', permits, 0, now - interval))
if released > 0 then
  redis.call('ZREMRANGEBYSCORE', permits, 0, now - interval)
  left = left + released
  if left > rate then
    left = rate - sum(redis.call('ZRANGE', permits, 0, -1))
  end
end
local allowed = left >= cost
if allowed then
  left = left - cost
  redis.call('ZADD', permits, now, redis.call('INCR', KEYS[1]) .. ':' .. cost)
end
redis.call('SET', value, left)
return allowed and 1 or 0
