-- Sliding log; the twin of src/limit/strategy/sliding_log.rs, which explains it.
--
-- Stored: a list. First a header, the sum of the charges in the list and the time of the newest; then for each charge its
-- time, oldest first, after its cost as a number below 0 if that is not 1.
-- Loaded: the sum of the charges within the period; the elements at the head that are to go, with the header (0: there is
-- no list; below 0: nothing in it counts); the time of the newest charge.

local FORMAT, LENGTH, MANY = '<i7i7', 14, 128

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

-- Calls `visit` with the cost and the time of each charge, and with how many elements it takes, until that returns true.
-- `list` has the elements of the key from `first` on, which is at `from` in the key; more are read as they are needed.
local function walk(key, list, first, from, visit)
  local cost, elements = 1, 0
  while #list >= first do
    for i = first, #list do
      local number = tonumber(list[i]) or 0
      elements = elements + 1
      if number < 0 then
        cost = -number
      else
        if visit(cost, number, elements) then
          return
        end
        cost, elements = 1, 0
      end
    end
    from, first = from + #list - first + 1, 1
    list = try('LRANGE', key, from, from + 127) or {}
  end
end

local function load(policy, key, now)
  local list = found(pcall('LRANGE', key, '0', '2'))
  local header = list and list[1]
  if not header or #header ~= LENGTH then
    return 0, list and #list == 0 and 0 or -1, now
  end
  local sum, newest = unpack(FORMAT, header)
  local start = now - policy.period
  if newest <= start then
    return 0, -1, now
  elseif newest > now then
    -- Of a clock that has gone back: all that counts is as if it had been charged now.
    return max(0, min(sum, 2 * policy.capacity)), -1, now, true
  end
  -- Mostly nothing has left the period. What comes first may also be a cost, below 0.
  local oldest = tonumber(list[2]) or 0
  if oldest > start then
    return max(0, sum), 1, newest
  end
  local gone = 0
  walk(key, list, 2, 1, function(cost, time, elements)
    if time > start then
      return true
    end
    sum, gone = sum - cost, gone + elements
  end)
  -- Many that are gone are dropped by a denial too, or each denial would have to walk past them.
  return max(0, sum), 1 + gone, newest, gone >= MANY
end

local function room(policy, now, sum)
  return policy.capacity - sum
end

local function wait(policy, key, now, cost, sum, head)
  local over, wait = sum + cost - policy.capacity, policy.period
  if head > 0 then
    walk(key, try('LRANGE', key, head, head + 1) or {}, 1, head, function(charge, time)
      over = over - charge
      -- A list that is not ours may hold any number.
      wait = max(1, min(time, now) + policy.period - now)
      return over <= 0
    end)
  end
  if over > 0 then
    -- What must leave is not in the list yet: it is charged by this same entry.
    return policy.period
  end
  return wait
end

-- Gives back the newest charges first, but nothing of the head: a list that is not ours may hold less than its header
-- says. Returns the time of the newest that is left.
local function give_back(policy, key, now, cost, head, newest)
  local left = (try('LLEN', key) or 0) - head
  while cost > 0 and left > 0 and not trouble do
    local last = try('LRANGE', key, -2, -1) or {}
    local before = left > 1 and tonumber(last[1]) or 0
    local charge = max(1, -before)
    if charge > cost then
      try('LSET', key, -2, cost - charge)
      cost = 0
    else
      try('RPOP', key)
      left = left - 1
      if before < 0 then
        try('RPOP', key)
        left = left - 1
      end
      cost = cost - charge
    end
  end
  local time = tonumber(try('LINDEX', key, -1))
  if time and time > now - policy.period and time <= newest then
    return time
  end
  return newest
end

local function charge(policy, key, now, cost, sum, head, newest)
  sum = max(0, sum + cost)
  if cost > 0 then
    return sum, head, now
  elseif sum > 0 and head > 0 then
    newest = give_back(policy, key, now, -cost, head, newest)
  end
  return sum, head, newest
end

local function reset(policy, now, sum, head, newest)
  if sum == 0 then
    return 0
  end
  return newest + policy.period - now
end

-- A time as text; mostly it is that of the call.
local last_time, last_time_text
local function text(time)
  if time ~= last_time then
    last_time, last_time_text = time, string.format('%.0f', time)
  end
  return last_time_text
end

local function save(policy, key, now, at, cost, sum, head, newest)
  if head <= 0 or sum == 0 then
    -- A new list, of one charge of everything that counts.
    if head ~= 0 then
      try('DEL', key)
    end
    if sum == 0 then
      return
    end
    try('RPUSH', key, pack(FORMAT, sum, newest), -sum, text(newest))
  elseif cost == 1 then
    try('RPUSH', key, text(now))
  elseif cost > 1 then
    try('RPUSH', key, -cost, text(now))
  end
  if trouble then
    return
  end
  if head > 0 then
    -- The last element that goes makes place for the header.
    if head > 1 then
      try('LTRIM', key, head - 1, -1)
    end
    try('LSET', key, '0', pack(FORMAT, sum, newest))
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
  reset = reset,
  save = save,
}
