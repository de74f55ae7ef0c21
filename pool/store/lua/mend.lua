-- mend: put the book and the lists of a rank right where they are not what its Programs make: keys were deleted from
-- outside. Counted on a version of the book that must still be the current one.
-- KEYS records hash of Programs that are listed there, and perhaps should not be
-- ARG rank str
-- ARG version str
-- ARG tokens num private ones of its active Programs
-- ARG reasoning num of them with jobs in flight
-- ARG ids list
-- INCLUDE clock book
-- RETURN {"ok"} | {"version"}
at.rank, at.ms = rank, now_ms()
if (redis.call('HGET', at.book, 'version') or '0') ~= version then return {'version'} end
for i, id in ipairs(ids) do
  local state, where, standing = unpack(redis.call('HMGET', records[i], 'state', 'rank', 'standing'))
  if state ~= 'active' or where ~= rank then redis.call('ZREM', at.active, id) end
  if not standing or where ~= rank then
    redis.call('ZREM', at.waiting, id)
    redis.call('HDEL', at.waiters, id)
    -- A member begins with what the record said.
    local found = redis.call('ZSCAN', at.order, 0, 'MATCH', '*' .. id, 'COUNT', redis.call('ZCARD', at.order) + 1)[2]
    for each = 1, #found, 2 do redis.call('ZREM', at.order, found[each]) end
  end
end
local left = 0
for _, held in ipairs(redis.call('HVALS', at.leaving)) do left = left + held end
redis.call('HSET', at.book, 'tokens', tokens, 'active', redis.call('ZCARD', at.active), 'reasoning', reasoning, 'leaving',
  string.format('%.0f', left))
changed(at)
return {'ok'}
