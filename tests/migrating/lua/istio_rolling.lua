-- Buckets that begin with a request and leave when their beginning is a window old: Istio's redisquota, ROLLING_WINDOW.
--
-- ARGV: now in microseconds, the cost, the most, the window and a bucket's length in microseconds.

local now, cost, most = tonumber(ARGV[1] .. '000'), tonumber(ARGV[2]), tonumber(ARGV[3])
local window, length = ARGV[4] * 1000, ARGV[5] * 1000
local buckets = KEYS[1] .. ':data'

local function field(name)
  return tonumber(redis.call('HGET', KEYS[1], name))
end

-- The count, the part of the newest bucket, and the start of that.
local used, newest, began = field('token') or 0, field('bucket.token') or 0, field('bucket.timestamp') or now
if now - began + 1 > length then
  if newest > 0 then
    redis.call('ZADD', buckets, began, redis.call('INCR', KEYS[1] .. ':key') .. '.' .. newest)
  end
  newest, began = 0, now
end
local gone = 0
for _, bucket in ipairs(redis.call('ZRANGEBYSCORE', buckets, 0, now - window)) do
  gone = gone + bucket:match('%.(%d+)')
end
redis.call('ZREMRANGEBYSCORE', buckets, 0, now - window)
used = math.max(0, used - gone)
local allowed = used + cost <= most
if allowed then
  used, newest = used + cost, newest + cost
end
redis.call('HMSET', KEYS[1], 'token', used, 'bucket.token', newest, 'bucket.timestamp', began)
return allowed and 1 or 0
