-- Agrees on a number with all other instances: the first one sets it.
--
-- KEYS   where it is kept
-- ARGV   this instance's number; 1 if another instance has confirmed it before, otherwise 0; milliseconds until it expires
-- Reply  the number that is kept; whether it is this instance's, and was there before
--
-- A confirmed number replaces another one: the other was set after the key was lost, by an instance that is wrong.

local kept = redis.call('MGET', KEYS[1])[1]
if kept and kept ~= ARGV[1] and ARGV[2] == '0' then
  return { tonumber(kept) or 0, 0 }
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return { tonumber(ARGV[1]), kept == ARGV[1] and 1 or 0 }
