-- Requests in flight; the twin of src/limit/strategy/in_flight.rs, which explains it.
--
-- Stored: for each instance that holds some: its number, how many, when it last told so, and for how long that is good.
-- Registers: what this instance holds, what the others do, and when the last of theirs ends. What is stored of the others
-- is kept in the policy until the next load.
--
-- Uses instance, decode and encode of call.lua; max, min, try and write of prelude.lua.

local HOLDER, LENGTH = '<I6I4i7I5', 22
-- A request may end at any time: who waits asks again after so many microseconds.
local AGAIN = 100000

local function policy(capacity, lease)
  return { capacity = capacity, lease = lease, counts_requests = true }
end

local function load(policy, key, now, value)
  local own, others, latest, rest, future = 0, 0, 0, '', false
  if value and #value % LENGTH == 0 then
    for at = 1, #value, LENGTH do
      local holder, count, told, lease = decode(HOLDER, value, at)
      if told > now then
        told, future = now, true
      end
      local stop = told + lease
      if stop > now then
        if holder == instance then
          own = count
        else
          others, latest = others + count, max(latest, stop)
          rest = rest .. encode(HOLDER, holder, count, told, lease)
        end
      end
    end
  end
  policy.rest = rest
  return own, others, latest, future
end

local function room(policy, now, own, others)
  return policy.capacity - own - others
end

local function wait()
  return AGAIN
end

local function charge(policy, key, now, cost, own, others, latest)
  return max(0, own + cost), others, latest
end

-- However long ago it was taken.
local function refund(policy, key, now, cost, of, own, others, latest)
  return min(cost, own), max(0, own - cost), others, latest
end

local function reset(policy, now, own, others, latest)
  return max(0, latest - now, own > 0 and policy.lease or 0)
end

local function save(policy, key, now, at, cost, own)
  if own > 0 then
    write(key, encode(HOLDER, instance, own, now, policy.lease) .. policy.rest, at)
  elseif policy.rest ~= '' then
    write(key, policy.rest, at)
  else
    try('DEL', key)
  end
end

return {
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  refund = refund,
  reset = reset,
  save = save,
}
