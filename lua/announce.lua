-- Announces an instance, and counts the live instances.
--
-- KEYS   a sorted set of the instances' names; the score is the time until which an instance is
--        alive, in milliseconds since the Unix epoch
-- ARGV   this instance's name; the milliseconds for which it is alive
-- Reply  the number of live instances

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now)
-- Remove entries beyond the TTL: a clock ahead of this one wrote them. Their instances, if alive, announce themselves
-- again.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. string.format('%.0f', now + ARGV[2]), '+inf')
-- Without the right to this command, nothing is added: it would never expire.
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
