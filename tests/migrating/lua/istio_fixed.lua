-- A window that begins with the first request: Istio's redisquota, FIXED_WINDOW. Its clock counts nanoseconds, which a double
-- rounds to 256.
--
-- ARGV: now in microseconds, the cost, the most, the window in microseconds, and the id of the request, if it has one.

local now, cost, most, window = tonumber(ARGV[1] .. '000'), ARGV[2], tonumber(ARGV[3]), ARGV[4] * 1000
local id = KEYS[1] .. ':' .. (ARGV[5] or '')
if ARGV[5] and now < tonumber(redis.call('GET', id) or 0) then
  return 1
end
local used, ends = unpack(redis.call('HMGET', KEYS[1], 'token', 'expire'))
if not used or now >= tonumber(ends) then
  used, ends = 0, window + now
end
local allowed = used + cost <= most
if allowed then
  used = used + cost
  if ARGV[5] then
    redis.call('SET', id, ends)
  end
end
redis.call('HMSET', KEYS[1], 'token', used, 'expire', ends)
return allowed and 1 or 0
