-- What the ranks of a model do. `ids`: those that the caller knows of, `records`: their records' keys.

-- Whether each live rank is in one of `states`; the reply that names what to declare, or who is in another one.
local function unlike(ranks, ids, records, states, at_ms)
  local known = {}
  for i, id in ipairs(ids) do known[id] = records[i] end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', ranks, '(' .. at_ms, '+inf')) do
    if not known[id] then return {'ranks'} end
    local state = redis.call('HGET', known[id], 'state')
    if state and not states[state] then return {'busy', id} end
  end
end
