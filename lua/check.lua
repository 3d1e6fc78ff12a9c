-- The driver: decides a batch of checks. Each check is of one caller, or of several, under one or more policies, and is
-- charged under all of them or none.

-- Returns the state after a denied take, and whether it must be saved: see `denied` in prelude.lua.
local function after_denial(strategy, policy, a, b, c, dirty)
  if strategy.denied then
    local x, y, z = strategy.denied(policy, now, a, b, c)
    if x then
      return x, y, z, true
    end
  end
  return a, b, c, dirty
end

-- Fast path: takes under one policy, of callers that occur once in the run. Decides exactly as `check` does, in less
-- time.
local function takes(plan, entries, times)
  local policy, now, reply, n = plan[1], now, reply, replied
  local cost, capacity, strategy = plan.cost, policy.capacity, policy.strategy
  local load, room_in, charge, reset_in = strategy.load, strategy.room, strategy.charge, strategy.reset
  first_error = nil
  local values = read(key_at + 1, key_at + entries)
  local unread = first_error
  -- All callers without a state get the same answers and the same state. For the first such caller, these are the place
  -- before its answers, its state, and the expiry of that state.
  local first, state, text
  for i = 1, entries do
    local key, value, from = KEYS[key_at + i], values[i], n
    first_error = unread
    if first and not value then
      for place = first + 1, first + 4 * times do
        n = n + 1
        reply[n] = reply[place]
      end
      write(key, state, text)
    else
      local granted, reset = 0
      local a, b, c, dirty = load(policy, key, now, value)
      local room = room_in(policy, now, a, b, c)
      for time = 1, times do
        local charged, wait = 0, 0
        if room >= cost then
          if cost > 0 then
            a, b, c = charge(policy, key, now, cost, a, b, c)
            -- Skip a call of `room`: a charge reduces the room by exactly its cost.
            charged, granted, room = cost, granted + cost, room - cost
          end
        else
          wait = -1
          if cost <= capacity then
            wait = strategy.wait(policy, key, now, cost, a, b, c)
          end
          a, b, c, dirty = after_denial(strategy, policy, a, b, c, dirty)
        end
        reset = reset_in(policy, now, a, b, c)
        reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = charged, room > 0 and room or 0, wait, reset
        n = n + 4
        if charged == 0 then
          n = repeat_last(n, 4, times - time)
          break
        end
      end
      if not first_error and (granted > 0 or dirty) then
        strategy.save(policy, key, now, now + reset + keep, granted, a, b, c)
        if not (value or first_error or strategy.has_lists) then
          first, state, text = from, written, written_text
        end
      end
    end
    if first_error then
      fail(from, n)
    end
  end
  key_at, replied = key_at + entries, n
end

local policies, plans, only_runs = { nil }, { nil }, true
for i = 1, policy_count do
  local number, first, second, third, fourth = decode(POLICY, ARGV[1 + i])
  local strategy = strategies[number]
  local policy = strategy.policy(first, second, third, fourth, sub(ARGV[1 + i], POLICY_LENGTH + 1))
  policy.strategy = strategy
  policies[i] = policy
end
if outside then
  return encode('<i8', now)
end
for i = 1, plan_count do
  local text = ARGV[1 + policy_count + i]
  local mode, cost, number = decode(PLAN, text)
  local plan = { nil, mode = mode, cost = cost, remember = 0, has_rate = false, run = false }
  if mode == RECORD then
    plan.mode, plan.cost, plan.recorded, plan.remember = CHARGE, 0, cost, number
  elseif mode == TAKE_AHEAD then
    plan.within = number
  elseif mode == REFUND and number < 0 then
    plan.turn = true
  elseif number < 0 then
    plan.refills_in = -number
  else
    plan.remember = number
  end
  local count = (#text - PLAN_LENGTH) / NUMBER_LENGTH
  if mode == REFUND then
    count = (#text - PLAN_LENGTH - CHARGE_OF_LENGTH) / (NUMBER_LENGTH + RESET_OF_LENGTH)
    local charged, age, time, at = decode(CHARGE_OF, text, PLAN_LENGTH + NUMBER_LENGTH * count + 1)
    if time > 0 then
      -- The check may have been delayed, so compute the age again. Redis's clock may differ from that at the
      -- charge; a greater age is safe, since it refunds less. But a turn is compared with the end of the last turn, so
      -- its age must be exact.
      age = math.max(plan.turn and 0 or age, now - time)
    end
    for place = 1, count do
      local reset
      reset, at = decode(RESET_OF, text, at)
      plan.of = plan.of or {}
      plan.of[place] = { cost = charged, age = age, reset = reset, turn = plan.turn }
    end
  end
  for place = 0, count - 1 do
    local policy = policies[(decode(NUMBER, text, PLAN_LENGTH + NUMBER_LENGTH * place + 1))]
    plan[place + 1], plan.has_rate = policy, plan.has_rate or not policy.in_flight
  end
  if #plan == 1 and plan.remember == 0 then
    local run_of = plan[1].strategy.run_of
    plan.run = run_of and run_of(mode) or not run_of and mode == TAKE and takes
  end
  plans[i], only_runs = plan, only_runs and plan.run
end

-- The rarer checks: `check` decides one entry, and remembers the answer of one with an id; `check_once` repeats that.
local check, check_once
if not only_runs then
  -- Returns the room that a policy must have to allow the check.
  local function needs(mode, cost, capacity)
    if mode == TAKE or mode == TAKE_AHEAD or mode == PEEK then
      return cost
    elseif mode == UP_TO then
      return min(cost, 1)
    elseif mode == CHARGE then
      return min(cost, 1) - capacity
    end
    return -math.huge
  end

  -- Returns the units that a policy would grant if all policies allow the check; for a refund or reset, the units to
  -- remove.
  local function grants(mode, cost, capacity, room)
    if mode == TAKE or mode == TAKE_AHEAD then
      return cost
    elseif mode == UP_TO then
      return max(0, min(cost, room))
    elseif mode == CHARGE then
      return max(0, min(cost, room + capacity))
    elseif mode == REFUND then
      return min(cost, capacity - room)
    elseif mode == RESET then
      return capacity - room
    end
    return 0
  end

  -- Per policy of the entry: the state (a, b, c), whether it must be saved (dirty), its room, the room that the check
  -- needs, the possible grant, the reset, and the total granted to all checks.
  local a, b, c, dirty, rooms, needed, granting, resets, totals = {}, {}, {}, {}, {}, {}, {}, {}, {}

  -- Returns the state of a policy as if its quota had written it: a turn drains at that rate.
  local function as_written(policy, i)
    local strategy = policy.strategy
    if strategy.written then
      return strategy.written(policy, now, a[i], b[i], c[i])
    end
    return a[i], b[i], c[i]
  end

  -- Returns whether a cost that exceeds the room is due in time, within the debt that the policy allows.
  local function is_due_in_time(plan, i)
    local policy, cost = plan[i], plan.cost
    if cost > policy.capacity or not policy.longest and rooms[i] - cost < -policy.capacity then
      return false
    end
    local most = min(plan.within, policy.longest or plan.within)
    local x, y, z = as_written(policy, i)
    return policy.strategy.wait(policy, KEYS[key_at + i], now, cost, x, y, z) <= most
  end

  -- Computes the need and the grant of a policy alone. Returns the maximum that each policy may grant; negative if this
  -- policy denies the check.
  local function preview(plan, i)
    local policy, mode, cost, room = plan[i], plan.mode, plan.cost, rooms[i]
    local capacity, most = policy.capacity, math.huge
    if policy.in_flight then
      needed[i], granting[i] = policy.strategy.preview(policy, KEYS[key_at + i], mode, room)
    else
      needed[i], granting[i] = needs(mode, cost, capacity), grants(mode, cost, capacity, room)
      if plan.refills_in then
        granting[i] = max(0, min(granting[i], room + div_ceil(plan.refills_in * policy.ticks, policy.interval)))
      end
      most = granting[i]
    end
    if room < needed[i] and not (mode == TAKE_AHEAD and is_due_in_time(plan, i)) then
      granting[i], most = 0, -1
    end
    return most
  end

  -- Charges a policy, for a take at most `most` units, or refunds or resets it. Returns the granted units.
  local function decide(plan, i, most)
    local policy, mode, granted, key = plan[i], plan.mode, granting[i], KEYS[key_at + i]
    local strategy = policy.strategy
    if mode == RESET then
      rooms[i], resets[i] = policy.capacity, 0
      return granted
    elseif policy.in_flight then
      granted, a[i], b[i] = strategy.hold(policy, key, now, mode, granted, most, a[i], b[i])
    elseif mode == REFUND and granted > 0 then
      granted, a[i], b[i], c[i] = strategy.refund(policy, key, now, plan.cost, plan.of[i], a[i], b[i], c[i])
    elseif mode ~= REFUND then
      granted = max(0, mode == CHARGE and granted or min(granted, most))
      if granted > 0 then
        a[i], b[i], c[i] = strategy.charge(policy, key, now, granted, a[i], b[i], c[i])
      elseif rooms[i] < needed[i] and (mode == TAKE or mode == TAKE_AHEAD or mode == UP_TO) then
        a[i], b[i], c[i], dirty[i] = after_denial(strategy, policy, a[i], b[i], c[i], dirty[i])
      end
    end
    rooms[i] = strategy.room(policy, now, a[i], b[i], c[i])
    resets[i] = strategy.reset(policy, now, a[i], b[i], c[i])
    return granted
  end

  -- Decides one check on the current states, and appends the answers. Returns the largest grant of a policy.
  local function decide_once(plan)
    local most, least, highest, from = math.huge, math.huge, 0, replied
    for i = 1, #plan do
      most = min(most, preview(plan, i))
    end
    for i = 1, #plan do
      local policy, wait = plan[i], 0
      if rooms[i] < needed[i] then
        wait = -1
        if needed[i] <= policy.capacity then
          local x, y, z = a[i], b[i], c[i]
          if min(granting[i], most) > 0 then
            x, y, z = as_written(policy, i)
          end
          wait = policy.strategy.wait(policy, KEYS[key_at + i], now, needed[i], x, y, z)
        end
      end
      local granted = decide(plan, i, most)
      totals[i], highest = totals[i] + granted, max(highest, granted)
      least = policy.in_flight and least or min(least, granted)
      reply[replied + 1], reply[replied + 2] = granted, max(0, rooms[i])
      reply[replied + 3], reply[replied + 4] = wait, resets[i]
      replied = replied + 4
    end
    -- Each policy cuts a charge separately. A refund must not exceed what one has charged.
    for place = from + 1, plan.mode == CHARGE and plan.has_rate and replied or 0, 4 do
      reply[place] = least
    end
    return highest
  end

  -- Saves the state of a policy after all checks of the entry.
  local function save(plan, i)
    local mode, policy, key = plan.mode, plan[i], KEYS[key_at + i]
    if mode == RESET then
      try('DEL', key)
    elseif totals[i] > 0 and mode ~= RELEASE or dirty[i] and mode ~= PEEK then
      local charged = mode == REFUND and -totals[i] or totals[i]
      policy.strategy.save(policy, key, now, now + resets[i] + keep, charged, a[i], b[i], c[i])
    end
  end

  -- The remembered answer of an id: the time of the charge, the time until which the answer is valid, and the answer of
  -- each policy. The key may expire up to a millisecond later.
  local TIMES, TIMES_LENGTH = '<I7I7', 14
  local ANSWER, ANSWER_LENGTH = '<I6I6I7', 19

  -- Returns whether one of the answers after the place `from` grants a cost. A granted slot in flight counts only if no
  -- policy of the plan limits a rate.
  local function has_charged(plan, from)
    local charged = false
    for i = 1, #plan do
      charged = charged or reply[from + 4 * i - 3] > 0 and not (plan[i].in_flight and plan.has_rate)
    end
    return charged
  end

  -- Remembers the answers after the place `from`. The key of the id precedes the keys of the policies.
  local function remember(plan, from)
    local forget_at = now + plan.remember
    for i = 1, #plan do
      if plan[i].is_window then
        forget_at = max(forget_at, now + reply[from + 4 * i])
      end
    end
    local answer = encode(TIMES, now, forget_at)
    for i = from + 1, replied, 4 do
      answer = answer .. encode(ANSWER, plan.recorded or max(0, reply[i]), reply[i + 1], reply[i + 3])
    end
    write(KEYS[key_at], answer, expiry(forget_at + keep))
  end

  -- Undoes what the check has changed under a policy whose key had this value, since a later write has failed: the user
  -- lacks a right. For any other reason Redis rejects the first write already.
  local function undo(plan, i, value, times, slots, at)
    local policy, key = plan[i], KEYS[key_at + i]
    local strategy, charged = policy.strategy, plan.mode == REFUND and -totals[i] or totals[i]
    if policy.in_flight then
      strategy.undo(policy, key, times, slots, at, now + resets[i] + keep)
    elseif value and policy.expires then
      -- The key expires no earlier than before. A value that was written in place has kept its length.
      if redis_pcall('SET', key, value, 'KEEPTTL').err then
        redis_pcall('SETRANGE', key, '0', value)
      end
    elseif strategy.has_lists and not value and a[i] > charged then
      -- The former list is lost, but not its sum.
      strategy.save(policy, key, now, now + policy.period + keep, 0, a[i] - charged, nil, c[i])
    else
      local first, second, third = strategy.load(policy, key, now, value or '')
      local reset = strategy.reset(policy, now, first, second, third)
      redis_pcall('SET', key, value or '', 'PXAT', expiry(now + reset + keep))
    end
  end

  -- Saves all states of an entry, or none if a write fails. `values` are the strings that the keys had. A failed renewal
  -- is kept, since its slot was held before.
  local function save_all(plan, values, times, slots, at)
    local count, mode, tried = #plan, plan.mode, 0
    while tried < count and not first_error do
      tried = tried + 1
      save(plan, tried)
    end
    if first_error and mode ~= RESET and mode ~= RENEW and mode ~= RELEASE then
      for i = 1, count do
        if totals[i] > 0 and (i < tried or plan[i].in_flight) then
          undo(plan, i, values[i], times, slots, at)
        end
      end
    end
  end

  -- Decides an entry of `times` equal checks. `slots` is a text with the ids of their slots, starting at `at`.
  function check(plan, times, slots, at)
    local count, from, first_slot = #plan, replied, at
    first_error = nil
    -- If this fails, nothing is saved.
    local values = read(key_at + 1, key_at + count)
    for i = 1, count do
      local policy, key = plan[i], KEYS[key_at + i]
      a[i], b[i], c[i], dirty[i] = policy.strategy.load(policy, key, now, values[i])
      rooms[i] = policy.strategy.room(policy, now, a[i], b[i], c[i])
      totals[i] = 0
    end
    for time = 1, times do
      slot, at = sub(slots, at, at + SLOT_LENGTH - 1), at + SLOT_LENGTH
      if decide_once(plan) == 0 and slot == '' then
        replied = repeat_last(replied, 4 * count, times - time)
        break
      end
    end
    -- First, since this can be undone without its former value.
    local remembers = plan.remember > 0 and not first_error and (has_charged(plan, from) or plan.mode == CHARGE)
    if remembers then
      remember(plan, from)
    end
    save_all(plan, values, times, slots, first_slot)
    if first_error and remembers then
      redis_pcall('SET', KEYS[key_at], '', 'PX', '1')
    end
    key_at = key_at + count
    if first_error then
      fail(from, replied)
    end
  end

  -- Repeats the remembered answer of the check's id, if there is one, with `remaining` limited to the present capacity.
  -- Returns the time of the charge, or nil.
  local function repeat_answer(plan)
    local key, count, value = KEYS[key_at + 1], #plan, read(key_at + 1, key_at + 1)[1]
    key_at = key_at + 1
    if not value or #value ~= TIMES_LENGTH + ANSWER_LENGTH * count then
      return nil
    end
    local charged_at, forget_at = decode(TIMES, value)
    if now >= forget_at then
      return nil
    elseif charged_at > now then
      -- The clock was set back: treat the charge as made now.
      charged_at, forget_at = now, now + forget_at - charged_at
      write(key, encode(TIMES, charged_at, forget_at) .. sub(value, 1 + TIMES_LENGTH), expiry(forget_at + keep))
    end
    for i = 1, count do
      local granted, remaining, reset = decode(ANSWER, value, TIMES_LENGTH + ANSWER_LENGTH * (i - 1) + 1)
      reply[replied + 1], reply[replied + 2] = granted, min(remaining, plan[i].capacity)
      reply[replied + 3], reply[replied + 4] = 0, reset
      replied = replied + 4
    end
    key_at = key_at + count
    return charged_at
  end

  -- Decides a check with an id once.
  function check_once(plan, slots, at)
    local charged_at = repeat_answer(plan)
    if not charged_at then
      check(plan, 1, slots, at)
    end
    replied = replied + 1
    -- Make a repeated answer at least 1 us old, to distinguish it from the charge in the same call.
    reply[replied] = charged_at and min(charged_at, now - 1) or now
  end
end

for i = 2 + policy_count + plan_count, #ARGV do
  local text = ARGV[i]
  local number, entries, times = decode(RUN, text)
  local plan = plans[number]
  local step = plan.run and MOST or 1
  for first = 0, entries - 1, step do
    local at = 1 + RUN_LENGTH + SLOT_LENGTH * times * first
    if plan.run then
      plan.run(plan, min(MOST, entries - first), times, text, at)
    elseif plan.remember > 0 then
      check_once(plan, text, at)
    else
      check(plan, times, text, at)
    end
  end
end
