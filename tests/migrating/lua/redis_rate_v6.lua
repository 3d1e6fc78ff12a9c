-- A counter for each window of the clock, by whole seconds: redis_rate v6 and v7, and Envoy's ratelimit. Whether the request
-- passes or not, every counter is raised.
--
-- ARGV: now in microseconds, the cost, and for each counter its limit and its window in seconds.

local now, cost = math.floor(ARGV[1] / 1000000), ARGV[2]
local allowed = 1
for i = 3, #ARGV, 2 do
  local slot = math.floor(now / ARGV[i + 1])
  if redis.call('INCRBY', KEYS[1] .. '-' .. i .. '-' .. slot, cost) > tonumber(ARGV[i]) then
    allowed = 0
  end
end
return allowed
