-- Until when a block of inputs is kept for the records of ended jobs. `until_ms` is a minute after the end of the last of
-- those; `kept` counts them by their ends, END:COUNT ..., for the one that is deleted before its end.

-- When a record stops to count as one that keeps its blocks, as `kept` has it: rounded up, to a power of two of ms that
-- is at most a 16th of the time until then, so that the many records of a block have few different ends.
local function kept_end(until_ms, at_ms)
  local _, exponent = math.frexp((until_ms - at_ms) / 32)
  local step_ms = 2 ^ math.max(exponent, 0)
  return math.ceil(until_ms / step_ms) * step_ms
end

-- `by` more records keep the block until `end_ms`. Those that are over are no longer counted. Returns the last end, 0
-- when no record keeps it.
local function count_kept(block, end_ms, by, at_ms)
  local counts, last_ms = {[end_ms] = 0}, 0
  for each, count in string.gmatch(redis.call('HGET', block, 'kept') or '', '(%d+):(%d+)') do
    counts[tonumber(each)] = tonumber(count)
  end
  counts[end_ms] = counts[end_ms] + by
  local kept = {}
  for each, count in pairs(counts) do
    if count > 0 and each > at_ms then
      kept[#kept + 1] = string.format('%d:%d', each, count)
      last_ms = math.max(last_ms, each)
    end
  end
  redis.call('HSET', block, 'kept', table.concat(kept, ' '))
  return last_ms
end

-- The block is kept for records until `until_ms`, 0: for none. Its data, until_ms and kept are what is left when no
-- unended job holds it.
local function settle(block, until_ms)
  redis.call('HSET', block, 'until_ms', until_ms)
  if redis.call('HLEN', block) > 3 then return end
  if until_ms > 0 then redis.call('PEXPIREAT', block, until_ms) else redis.call('DEL', block) end
end
