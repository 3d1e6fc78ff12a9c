-- Sliding log; the twin of src/limit/strategy/sliding_log.rs, which explains it.
--
-- Stored: a list of charges, oldest first: for each its time, and the sum of all costs up to it. Both are kept without
-- their upper bytes, so only differences count. The first element counts nothing: it is the base, no later than the
-- others, whose sum is taken from theirs. So whatever depends on the order of times or of sums is found by a binary search.
-- Loaded: the sum of the charges within the period; the place of the base times WRAP, plus its sum (NONE: there is no
-- list; NOTHING: none of its elements stays); the time of the newest charge, above `now` if the clock has gone back.
--
-- Uses decode and encode of call.lua; expiry, good, max, min, redis_pcall, search, sub, trouble and try of prelude.lua.

local FORMAT, LENGTH, SUM, SUM_AT = '<I6I3', 9, '<I3', 7
-- Times and sums start again at these, which no two that are kept are apart.
local SPAN, HALF, WRAP = 2 ^ 48, 2 ^ 47, 2 ^ 24
local NONE, NOTHING = -1, -2

-- The reply to a read; nothing if there is no such key. One that holds something of another type is as good as none.
local function found(reply)
  if type(reply) == 'table' and reply.err then
    if sub(reply.err, 1, 9) ~= 'WRONGTYPE' then
      good(reply)
    end
    return nil
  end
  return reply
end

local function policy(capacity, period)
  return { capacity = capacity, period = period }
end

-- How long ago a time was; below 0 if it is still to come.
local function age(now, time)
  return (now - time + HALF) % SPAN - HALF
end

-- The time and the sum of an element. One that is not ours is long gone.
local function read_charge(element)
  if element and #element == LENGTH then
    return decode(FORMAT, element)
  end
  return 0, 0
end

-- The first charge of the key that was loaded last: a denied caller mostly waits for just this one.
local first_key, first_charge

local function load(policy, key, now)
  local list = found(redis_pcall('LRANGE', key, '0', '2'))
  local base, first = list and list[1], list and list[2]
  if not first or #base ~= LENGTH or #first ~= LENGTH then
    return 0, list and not base and NONE or NOTHING, now
  end
  local last = list[3] and try('LINDEX', key, '-1') or first
  if #last ~= LENGTH then
    return 0, NOTHING, now
  end
  local period, newest, total = policy.period, decode(FORMAT, last)
  newest = now - age(now, newest)
  if newest <= now - period then
    return 0, NOTHING, now
  end
  local head, base_sum = 0, decode(SUM, base, SUM_AT)
  local since = age(now, (decode(FORMAT, first)))
  if since >= period then
    -- Some have left the period; mostly it is just this one.
    base, head = first, 1
    first = list[3]
    if age(now, (read_charge(first))) >= period then
      head = search(2, WRAP, function(place)
        local element = try('LINDEX', key, place)
        return not element or age(now, (read_charge(element))) < period
      end)
      list = try('LRANGE', key, head, head + 1) or {}
      base, first = list[1], list[2]
    end
    base_sum = select(2, read_charge(base))
  end
  local sum = (total - base_sum) % WRAP
  if sum == 0 or since < 0 then
    -- Of a clock that has gone back: all is as if it had been charged now.
    return sum, NOTHING, newest, since < 0
  end
  first_key, first_charge = key, first
  return sum, head * WRAP + base_sum, newest, newest > now
end

-- The place of the base, and its sum.
local function base_of(loaded)
  local sum = loaded % WRAP
  return (loaded - sum) / WRAP, sum
end

local function room(policy, now, sum)
  return policy.capacity - sum
end

local function wait(policy, key, now, cost, sum, loaded)
  if loaded < 0 then
    return policy.period
  end
  -- The first charge that leaves room when it goes.
  local over, head, base = sum + cost - policy.capacity, base_of(loaded)
  local charge = first_charge
  if first_key ~= key then
    charge = try('LINDEX', key, head + 1)
  end
  local time, total = read_charge(charge)
  if (total - base) % WRAP < over then
    -- Each has a cost of 1 or more, and most have one of 1.
    local place = search(head + over, head + 1, function(place)
      local element = try('LINDEX', key, place)
      return element and (select(2, read_charge(element)) - base) % WRAP < over
    end)
    charge = try('LINDEX', key, place)
    if not charge then
      -- It is not in the list yet: it is charged by this same entry.
      return policy.period
    end
    time = read_charge(charge)
  end
  -- A list that is not ours may hold any time.
  return max(1, policy.period - max(0, age(now, time)))
end

local function charge(policy, key, now, cost, sum, loaded, newest)
  return sum + cost, loaded, max(newest, now)
end

-- Of a charge within the period, from the oldest charges first.
local function give_back(policy, key, now, cost, of, sum, loaded, newest)
  local left = max(0, sum - cost)
  if of.reset - of.age <= 0 then
    return 0, sum, loaded, newest
  elseif loaded < 0 or left == 0 or newest > now then
    -- What is left of a clock that has gone back is as if it had been charged now.
    return cost, left, loaded < 0 and loaded or NOTHING, min(newest, now)
  end
  local head, base = base_of(loaded)
  -- Each has a cost of 1 or more, and most have one of 1.
  local place = search(head, head + cost + 1, function(place)
    local element = try('LINDEX', key, place)
    return not element or (select(2, read_charge(element)) - base) % WRAP > cost
  end)
  first_key = nil
  return cost, left, place * WRAP + (base + cost) % WRAP, newest
end

local function reset(policy, now, sum, loaded, newest)
  if sum == 0 then
    return 0
  end
  return min(newest, now) + policy.period - now
end

local function save(policy, key, now, at, cost, sum, loaded, newest)
  if loaded < 0 or sum == 0 then
    -- A new list, of one charge of everything that counts.
    if loaded ~= NONE then
      try('DEL', key)
    end
    if sum == 0 then
      return
    end
    local time = min(newest, now)
    try('RPUSH', key, encode(FORMAT, time, 0), encode(FORMAT, time, sum))
    if trouble then
      return
    end
  else
    local head, base = base_of(loaded)
    if newest > now then
      -- Of a clock that has gone back: what was charged after now is one charge of now. Something was before, see `load`.
      local cut = search(-1, -WRAP, function(place)
        local element = try('LINDEX', key, place)
        return not element or age(now, (read_charge(element))) >= 0
      end)
      try('LSET', key, cut, encode(FORMAT, now, base + sum))
      if trouble then
        return
      end
      try('LTRIM', key, '0', cut)
    elseif cost > 0 then
      try('RPUSH', key, encode(FORMAT, now, base + sum))
      if trouble then
        return
      end
    end
    if cost < 0 then
      -- Of the charge after the base a part may have been given back.
      try('LSET', key, head, encode(FORMAT, (read_charge(try('LINDEX', key, head))), base))
      if trouble then
        return
      end
    end
    if head > 0 then
      -- The last that has left is the new base.
      try('LTRIM', key, head, '-1')
    end
  end
  try('PEXPIREAT', key, expiry(at))
  if trouble then
    -- A list that is half written, or would stay for ever.
    try('DEL', key)
  end
end

return {
  reads = false,
  policy = policy,
  load = load,
  room = room,
  wait = wait,
  charge = charge,
  give_back = give_back,
  reset = reset,
  save = save,
}
