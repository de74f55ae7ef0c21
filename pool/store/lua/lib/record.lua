-- The record of a Program (fields: pool/store/program_records.py) as a table: whole numbers, but for TEXT. [0] holds what
-- is no field: the keys `key`, `pool` and `gone`, the `id`, and the fields as they `were` read.
local TEXT = {tenant = 1, name = 1, state = 1, status = 1, rank = 1, seat = 1, standing = 1, reserver = 1, parent = 1,
  root = 1, key = 1, last = 1}

-- Takes over the fields of a list name, value ...
local function learn(p, flat)
  for i = 1, #flat, 2 do
    p[flat[i]] = TEXT[flat[i]] and flat[i + 1] or tonumber(flat[i + 1])
  end
end

-- Without fields for a Program that is not there.
local function program_of(key, pool, gone, id)
  local p, were, flat = {}, {}, redis.call('HGETALL', key)
  learn(p, flat)
  for name, value in pairs(p) do
    were[name] = value
  end
  p[0] = {key = key, pool = pool, gone = gone, id = id, were = were}
  return p
end

-- Writes the fields that are others by now; of a released one nothing.
local function save(p)
  local from, set, lost = p[0], {}, {}
  if from.released then return end
  for name, value in pairs(p) do
    if name ~= 0 and from.were[name] ~= value then
      set[#set + 1] = name
      set[#set + 1] = type(value) == 'number' and string.format('%.0f', value) or value
    end
  end
  for name in pairs(from.were) do
    if p[name] == nil then lost[#lost + 1] = name end
  end
  if set[1] then redis.call('HSET', from.key, unpack(set)) end
  if lost[1] then redis.call('HDEL', from.key, unpack(lost)) end
end
