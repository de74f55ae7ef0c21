-- heartbeat: register a rank, or renew it. One live incarnation a rank id.
-- KEY record hash who the rank is, TTL = its lease
-- KEY ranks zset
-- KEY told hash
-- ARG rank str
-- ARG incarnation str random, one life of the process
-- ARG replace flag 1: the caller knows that the former incarnation is dead
-- ARG lease ms
-- ARG facts str what it tells of itself
-- ARG fields list name, value ... of the record
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok"} | {"taken", host, pid}
local seen = redis.call('HMGET', record, 'incarnation', 'host', 'pid')
if seen[1] and seen[1] ~= incarnation and replace == 0 then return {'taken', seen[2], seen[3]} end
redis.call('HSET', record, 'incarnation', incarnation, unpack(fields))
redis.call('PEXPIRE', record, lease)
local at_ms = now_ms()
local gone = redis.call('ZRANGEBYSCORE', ranks, '-inf', at_ms, 'LIMIT', 0, 100)
if gone[1] then
  redis.call('ZREM', ranks, unpack(gone))
  redis.call('HDEL', told, unpack(gone))
end
redis.call('ZADD', ranks, at_ms + lease, rank)
redis.call('HSET', told, rank, facts)
redis.call('PEXPIRE', ranks, lease)
redis.call('PEXPIRE', told, lease)
return {'ok'}
