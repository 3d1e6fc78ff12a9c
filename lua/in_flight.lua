-- Requests in flight. The Rust half, src/limit/in_flight.rs, explains the algorithm. The driver calls the
-- functions of a strategy, and these:
--   preview(policy, key, mode, room)
--       the room that the check needs, and the amount that it grants
--   hold(policy, key, now, mode, grants, most, ...)
--       the granted amount (0 if `most` is negative, since a policy denies the check), and the new state
--   undo(policy, key, times, slots, at, stop)
--       removes the slots of failed takes
--   run_of(mode)
--       the function that decides a run of such checks, if there is one
--
-- Stored: a sorted set of the slots' ids; the score is the expiry in microseconds.
--
-- State: the number of slots, and the expiry of the last one.
--
-- Uses slot, keep, encode, decode, max and min of call.lua; expiry, fail, first_error, record_error, read, try and write
-- of prelude.lua.

-- Wait of a denied check, in microseconds: a request may end at any time.
local AGAIN = 100000
-- Maximum TTL of a slot, in microseconds.
local LONGEST_TTL = 3600000000

local function text(number)
  return string.format('%.0f', number)
end

local now_text = text(now)

local function policy(capacity, ttl)
  local expires = now + ttl
  return { capacity = capacity, expires = expires, expires_text = text(expires), in_flight = true }
end

-- Returns whether the reply shows that the key has a value of another type, which counts as empty.
local function is_foreign(reply)
  return type(reply) == 'table' and reply.err and string.find(reply.err, 'WRONGTYPE', 1, true)
end

-- Removes expired slots. If the clock was ahead when slots were taken, limits their expiry to the
-- maximum TTL from now.
local function load(policy, key, now)
  local count = redis_pcall('ZCARD', key)
  policy.foreign = is_foreign(count)
  if count == 0 or policy.foreign or record_error(count, 'ZCARD') then
    return 0, 0, 0, false
  end
  count = count - (try('ZREMRANGEBYSCORE', key, '-inf', now_text) or 0)
  local last = try('ZRANGE', key, '-1', '-1', 'WITHSCORES')
  local latest, bound = last and tonumber(last[2]) or 0, now + LONGEST_TTL
  if latest <= bound then
    return count, latest, 0, false
  end
  for _, id in ipairs(try('ZRANGE', key, '(' .. text(bound), '+inf', 'BYSCORE') or {}) do
    try('ZADD', key, text(bound), id)
  end
  try('PEXPIREAT', key, expiry(bound + keep))
  return count, bound, 0, false
end

local function room(policy, now, count)
  return policy.capacity - count
end

local function wait()
  return AGAIN
end

local function reset(policy, now, count, latest)
  return count > 0 and max(0, latest - now) or 0
end

-- The slots are already stored; this only sets the expiry of the key.
local function save(policy, key, now, at)
  try('PEXPIREAT', key, expiry(at))
end

-- Removes the slots of failed takes, which start at `at` of a text. If that fails, lets their key expire.
local function undo(policy, key, times, slots, at, stop)
  for time = 0, times - 1 do
    local from = at + SLOT_LENGTH * time
    if not try('ZREM', key, sub(slots, from, from + SLOT_LENGTH - 1)) and not try('PEXPIREAT', key, expiry(stop)) then
      try('DEL', key)
    end
  end
end

local function preview(policy, key, mode, room)
  if mode == PEEK then
    return 1, 0
  elseif mode == TAKE or mode == TAKE_AHEAD or mode == UP_TO then
    -- A slot that is already held may be taken again without room, since that changes nothing.
    if room < 1 and not policy.foreign and try('ZSCORE', key, slot) then
      return -math.huge, 1
    end
    return 1, 1
  elseif mode == RESET then
    return -math.huge, policy.capacity - room
  end
  return -math.huge, (mode == RENEW or mode == RELEASE) and 1 or 0
end

local function hold(policy, key, now, mode, grants, most, count, latest)
  if first_error or most < 0 or grants == 0 then
    return 0, count, latest
  elseif mode == RELEASE then
    local reply = redis_pcall('ZREM', key, slot)
    if is_foreign(reply) or record_error(reply, 'ZREM') then
      return 0, 0, 0
    end
    count, latest = load(policy, key, now)
    return 1, count, latest
  end
  if policy.foreign then
    try('DEL', key)
    policy.foreign = nil
  end
  local added = try('ZADD', key, 'GT', policy.expires_text, slot)
  if not added then
    return 0, count, latest
  end
  return 1, count + added, max(latest, policy.expires)
end

-- Decides takes, renewals or releases under one policy: `times` equal checks of each of `entries` callers. `slots` is a
-- text with the ids of the slots, starting at `at`.
local function run(plan, entries, times, slots, at)
  local policy, mode, reply = plan[1], plan.mode, reply
  for i = 1, entries do
    local key, from, n, saves, first_slot = KEYS[key_at + i], replied, replied, false, at
    first_error = nil
    local count, latest = 0, 0
    if mode ~= RELEASE then
      count, latest = load(policy, key, now)
    end
    for _ = 1, times do
      slot, at = sub(slots, at, at + SLOT_LENGTH - 1), at + SLOT_LENGTH
      local room = policy.capacity - count
      local needs, grants = preview(policy, key, mode, room)
      local granted
      granted, count, latest = hold(policy, key, now, mode, grants, room - needs, count, latest)
      saves = saves or granted > 0 and mode ~= RELEASE
      reply[n + 1], reply[n + 2] = granted, max(0, policy.capacity - count)
      reply[n + 3], reply[n + 4] = room < needs and AGAIN or 0, reset(policy, now, count, latest)
      n = n + 4
    end
    if saves and not first_error then
      save(policy, key, now, latest + keep)
    end
    replied = n
    if first_error then
      -- The slot of a failed renewal was held before.
      if saves and mode ~= RENEW then
        undo(policy, key, times, slots, first_slot, latest + keep)
      end
      fail(from, n)
    end
  end
  key_at = key_at + entries
end

local function run_of(mode)
  return (mode == TAKE or mode == UP_TO or mode == RENEW or mode == RELEASE) and run
end

return {
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  reset = reset,
  save = save,
  preview = preview,
  hold = hold,
  undo = undo,
  run_of = run_of,
}
