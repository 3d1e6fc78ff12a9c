-- Requests in flight; the twin of src/limit/in_flight.rs, which explains it. Beside what each strategy has, the driver asks
-- for what differs:
--   preview(mode, cost, capacity, room, own, ...)   the room that it needs, what it would grant, and the most that the other
--                                             policies may grant
--   hold(mode, grants, most, own)             what was granted of that if no policy grants more than `most`, and the state then
--   run_of(mode)                              what decides a run of such checks, if there is such a thing
--
-- Stored: for each instance that holds some: its number, how many, when it last told so, and for how long that is good.
-- Registers: what this instance holds, what the others do, and when the last of theirs ends. What is stored of the others
-- is kept in the policy until the next load.
--
-- Uses instance, keep, decode, encode, max and min of call.lua; expiry, fail, read, try and write of prelude.lua.

local HOLDER, LENGTH = '<I6I4i7I5', 22
-- A request may end at any time: who waits asks again after so many microseconds.
local AGAIN = 100000

local function policy(capacity, lease)
  return { capacity = capacity, lease = lease, in_flight = true }
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
  return own + cost, others, latest
end

local function reset(policy, now, own, others, latest)
  return max(0, latest - now, own > 0 and policy.lease or 0)
end

local function save(policy, key, now, at, cost, own)
  if own > 0 then
    write(key, encode(HOLDER, instance, own, now, policy.lease) .. policy.rest, expiry(at))
  elseif policy.rest ~= '' then
    write(key, policy.rest, expiry(at))
  else
    try('DEL', key)
  end
end

-- Only a charge bounds what the other policies grant: a request is none of their cost.
local function preview(mode, cost, capacity, room, own, needs, grants)
  if mode == PEEK then
    return 1, 0, math.huge
  elseif mode == TAKE or mode == TAKE_AHEAD or mode == UP_TO then
    return 1, 1, math.huge
  elseif mode == CHARGE then
    local granted = grants(mode, cost, capacity, room)
    return needs(mode, cost, capacity), granted, granted
  elseif mode == REFUND then
    -- However long ago it was taken.
    return -math.huge, min(cost, own), math.huge
  elseif mode == RESET then
    return -math.huge, capacity - room, math.huge
  elseif mode == RENEW and own > 0 then
    return -math.huge, own, math.huge
  end
  return -math.huge, cost, math.huge
end

local function hold(mode, grants, most, own)
  if mode == REFUND then
    return grants, own - grants
  elseif mode == RENEW or mode == HOLD then
    return grants, grants
  elseif most < 0 then
    return 0, own
  elseif mode == CHARGE then
    grants = min(grants, most)
  end
  return grants, own + grants
end

-- Decides what instances tell of what they hold under one policy, of callers who come once in the run.
local function run(plan, entries, times)
  local policy, mode, cost, reply, n = plan[1], plan.mode, plan.cost, reply, replied
  -- Those of whom nothing is held any more, and where their answers begin: one command deletes all of them.
  local gone, gone_from = {}, {}
  trouble = nil
  local values = read(key_at + 1, key_at + entries)
  local unread = trouble
  for i = 1, entries do
    local key, from = KEYS[key_at + i], n
    trouble = unread
    local own, others, latest, dirty = load(policy, key, now, values[i])
    local before, fresh_in = own, 0
    for _ = 1, times do
      local _, grants = preview(mode, cost, policy.capacity, room(policy, now, own, others), own)
      reply[n + 1], own = hold(mode, grants, math.huge, own)
      fresh_in = reset(policy, now, own, others, latest)
      reply[n + 2], reply[n + 3], reply[n + 4] = max(0, room(policy, now, own, others)), 0, fresh_in
      n = n + 4
    end
    if not trouble and (own ~= before or dirty or mode ~= REFUND) then
      if own == 0 and others == 0 then
        gone[#gone + 1], gone_from[#gone_from + 1] = key, from
      else
        save(policy, key, now, now + fresh_in + keep, 0, own)
      end
    end
    if trouble then
      fail(from, n)
    end
  end
  trouble = nil
  if #gone > 0 and not try('DEL', unpack(gone)) then
    for i = 1, #gone do
      fail(gone_from[i], gone_from[i] + 4 * times)
    end
  end
  key_at, replied = key_at + entries, n
end

local function run_of(mode)
  return (mode == REFUND or mode == RENEW or mode == HOLD) and run
end

return {
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  reset = reset,
  save = save,
  preview = preview,
  hold = hold,
  run_of = run_of,
}
