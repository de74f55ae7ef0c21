-- heartbeat: register a rank, or renew it. One live incarnation a rank id. Tells whether its model is wanted.
-- KEY record hash who the rank is, TTL = its lease
-- KEY ranks zset
-- KEY told hash
-- KEY places zset
-- KEY model hash
-- KEY load hash rank -> `IN_FLIGHT SLOTS`
-- ARG rank str
-- ARG incarnation str random, one life of the process
-- ARG replace flag 1: the caller knows that the former incarnation is dead
-- ARG state str what it does with its model
-- ARG most num replicas there may be, 0 for any number
-- ARG lease ms
-- ARG facts str what it tells of itself
-- ARG fields list name, value ... of the record
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok", wanted or "", change, change that a rank has carried out, ms that are left to drain, ranks, 1 when this one
--   has a place, or there is one for it} | {"taken", host, pid}
-- A replica has a place from when it begins to load until it has freed what it had. One that begins to load gets none where
-- all are taken.
local seen = redis.call('HMGET', record, 'incarnation', 'host', 'pid')
if seen[1] and seen[1] ~= incarnation and replace == 0 then return {'taken', seen[2], seen[3]} end
-- What a former life told of itself would have others leave work to one that only loads.
if seen[1] ~= incarnation then redis.call('HDEL', load, rank) end
redis.call('HSET', record, 'incarnation', incarnation, 'state', state, unpack(fields))
redis.call('PEXPIRE', record, lease)
local at_ms = now_ms()
local gone = redis.call('ZRANGEBYSCORE', ranks, '-inf', at_ms, 'LIMIT', 0, 100)
if gone[1] then
  redis.call('ZREM', ranks, unpack(gone))
  redis.call('HDEL', told, unpack(gone))
  redis.call('HDEL', load, unpack(gone))
end
redis.call('ZADD', ranks, at_ms + lease, rank)
redis.call('HSET', told, rank, facts)
redis.call('PEXPIRE', ranks, lease)
redis.call('PEXPIRE', told, lease)
redis.call('ZREMRANGEBYSCORE', places, '-inf', at_ms)
local holds = state == 'loaded' or state == 'draining' or redis.call('ZSCORE', places, rank)
local has_place = holds or most == 0 or redis.call('ZCARD', places) < most
if has_place and (state == 'loaded' or state == 'draining' or state == 'loading') then
  redis.call('ZADD', places, at_ms + lease, rank)
  redis.call('PEXPIRE', places, lease)
elseif holds then
  redis.call('ZREM', places, rank)
end
local wish = redis.call('HMGET', model, 'wanted', 'change', 'done', 'until_ms', 'failed')
if state == 'loaded' and wish[1] == 'loaded' and (wish[5] or wish[3] ~= wish[2]) then
  redis.call('HSET', model, 'done', wish[2])
  redis.call('HDEL', model, 'failed')
end
return {'ok', wish[1] or '', tonumber(wish[2] or 0), tonumber(wish[3] or 0), math.max((wish[4] or at_ms) - at_ms, 0),
  redis.call('ZCARD', ranks), has_place and 1 or 0}
