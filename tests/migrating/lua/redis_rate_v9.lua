-- GCRA in seconds as floats: redis_rate v9 and v10. Its key holds the time at which all that was granted will have flowed back,
-- since the beginning of 2017.
--
-- ARGV: now in microseconds, 0 for Redis's own; the cost; how many per period, the period in seconds, the burst.

local micros, cost, rate, period, burst = unpack(ARGV)
local time = { math.floor(micros / 1000000), micros % 1000000 }
if micros == '0' then
  time = redis.call('TIME')
end
local now = time[1] - 1483228800 + time[2] / 1000000
local interval = period / rate
local tat = math.max(now, tonumber(redis.call('GET', KEYS[1]) or now)) + interval * cost
if (now - (tat - interval * burst)) / interval < 0 then
  return 0
end
redis.call('SET', KEYS[1], tat)
return 1
