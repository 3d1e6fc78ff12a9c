-- The sliding log that many have written, as a sorted set of times in milliseconds.
--
-- ARGV: now in microseconds, the cost (which it does not know), the most, the window in milliseconds, whether a member is the time
-- or `unique`, and whether it is added before or after they are counted.

local now, most, window, member, added = math.floor(ARGV[1] / 1000), tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
if member == 'unique' then
  member = redis.call('INCR', KEYS[1] .. ':member')
else
  member = now
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - window)
if added == 'before' then
  redis.call('ZADD', KEYS[1], now, member)
  return redis.call('ZCARD', KEYS[1]) <= most and 1 or 0
end
if redis.call('ZCARD', KEYS[1]) >= most then
  return 0
end
redis.call('ZADD', KEYS[1], now, member)
return 1
