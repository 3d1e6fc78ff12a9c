-- Announces an instance, and counts those that are alive.
--
-- KEYS   the set of the instances' names, by the time until which each is alive
-- ARGV   this instance's name; for how many milliseconds it is alive
-- Reply  how many instances are alive

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now)
-- Also instances that a clock noted which was ahead: those that are alive announce themselves again.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now + ARGV[2]), '+inf')
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
