-- The sliding window that many have written, as a hash of counts: a field is when its cell began, in milliseconds, and is dropped
-- when that is a window ago.
--
-- ARGV: now in microseconds, the cost, the most, the window and a cell in milliseconds.

local now, cost, most, window, cell = math.floor(ARGV[1] / 1000), ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local used = 0
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  if tonumber(fields[i]) <= now - window then
    redis.call('HDEL', KEYS[1], fields[i])
  else
    used = used + fields[i + 1]
  end
end
if used + cost > most then
  return 0
end
redis.call('HINCRBY', KEYS[1], now - now % cell, cost)
return 1
