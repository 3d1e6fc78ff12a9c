-- Agrees on a number with all other instances: the first one sets it.
--
-- KEYS   where it is kept
-- ARGV   this instance's number; for how many milliseconds it is kept
-- Reply  the number that is kept

local kept = redis.call('MGET', KEYS[1])[1]
if kept and kept ~= ARGV[1] then
  return tonumber(kept) or 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return tonumber(ARGV[1])
