-- Stores this instance's number, unless another number is stored.
--
-- KEYS   the key of the number
-- ARGV   this instance's number; 1 if another instance has confirmed it before, otherwise 0; TTL in milliseconds
-- Reply  the stored number; 1 if the key had this instance's number before, otherwise 0
--
-- A number that another instance has confirmed replaces a different stored number: an instance with a wrong number set
-- that one after the key was lost.

local kept = redis.call('MGET', KEYS[1])[1]
if kept and kept ~= ARGV[1] and ARGV[2] == '0' then
  return { tonumber(kept) or 0, 0 }
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return { tonumber(ARGV[1]), kept == ARGV[1] and 1 or 0 }
