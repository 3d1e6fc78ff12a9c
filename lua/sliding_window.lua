-- Sliding window of cells. The Rust half, src/limit/strategy/sliding_window.rs, explains the algorithm.
--
-- Stored: cells, each with its end time. The header is the last cell that has left the period.
--
-- State: the sum of the cells within the period; the header and those cells as stored; the end of the newest
-- cell.
--
-- Uses encode, max, min and WRAP of call.lua; CELL, cell_functions, expiry, try and write of prelude.lua.

local search, cells_in, cell, sum_to, up_to, after, take_out = cell_functions()
local FRESH = encode(CELL, 0, 0)

local function policy(capacity, period, _, width)
  return { capacity = capacity, period = period, width = width }
end

-- Returns the end of the cell that contains a time.
local function cell_end(policy, time)
  return time - time % policy.width + policy.width
end

local function load(policy, key, now, value)
  local count = cells_in(value)
  if count == 0 then
    return 0, FRESH, 0
  end
  local start, latest = now - policy.period, cell_end(policy, now)
  local newest, total = cell(value, count)
  if newest <= start then
    return 0, FRESH, 0
  end
  if count > 1 and cell(value, 1) <= start then
    local gone = search(1, count, function(place)
      return cell(value, place) > start
    end)
    value, count = after(value, gone - 1), count - gone
  end
  local sum = sum_to(value, count)
  if sum == 0 then
    return 0, FRESH, 0
  elseif newest <= latest then
    return sum, value, newest
  end
  -- The clock was set back: charges of future cells count as if made now.
  local _, kept = search(count, 0, function(place)
    return cell(value, place) < latest
  end)
  return sum, up_to(value, kept) .. encode(CELL, latest, total), latest, true
end

local function room(policy, now, sum)
  return policy.capacity - sum
end

-- Returns the time until a cell with this end leaves the period. Data written by another program
-- may have any end.
local function leaves(policy, now, ends)
  return max(1, min(ends - now, policy.period) + policy.period)
end

local function wait(policy, key, now, cost, sum, cells, newest)
  -- The first cell whose expiry frees enough room. If it is not stored yet, it is the newest,
  -- charged by this same entry.
  local over, count = sum + cost - policy.capacity, cells_in(cells)
  local _, place = search(0, count + 1, function(place)
    return sum_to(cells, place) >= over
  end)
  return leaves(policy, now, place > count and newest or (cell(cells, place)))
end

local function charge(policy, key, now, cost, sum, cells, newest)
  return sum + cost, cells, max(newest, cell_end(policy, now))
end

-- The charge is refunded only if it still counts: from its own cell and later ones.
local function refund(policy, key, now, cost, of, sum, cells, newest)
  if of.reset - of.age <= 0 then
    return 0, sum, cells, newest
  end
  if sum > cost then
    local before = search(0, cells_in(cells) + 1, function(place)
      return cell(cells, place) > now - of.age
    end)
    cells = take_out(cells, min(sum_to(cells, before), sum - cost), cost)
    newest = cell(cells, cells_in(cells))
  end
  return min(cost, sum), max(0, sum - cost), cells, newest
end

local function reset(policy, now, sum, cells, newest)
  if sum == 0 then
    return 0
  end
  return leaves(policy, now, newest)
end

local function save(policy, key, now, at, cost, sum, cells, newest)
  if sum == 0 then
    try('DEL', key)
    return
  end
  if cost > 0 then
    -- Add to the last cell, unless it ends before the current one.
    local count, _, base = cells_in(cells), cell(cells, 0)
    if count > 0 and cell(cells, count) == newest then
      count = count - 1
    end
    cells = up_to(cells, count) .. encode(CELL, newest, (base + sum) % WRAP)
  end
  write(key, cells, expiry(at))
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
